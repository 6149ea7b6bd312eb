"""A batch of groups becomes rows: the segments that give a gradient, judged by the staleness window.

Group[Trajectory] ──advantages──► per trajectory ──window──► Row a segment, or only counted where its loss is exactly 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from services.policies.batching import Group
from services.wire.packed import Float32Array, Int32Array, unpack_logprobs, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Trajectory, VersionSpan
from trainer.advantages import grpo
from trainer.window import NOT_SAMPLED, Ages, StalenessTally, count_only, judge


@dataclass(frozen=True)
class Row:
    """A segment of `n` tokens that gives a gradient: ids int32 `[n]`, behaviour logprobs float32 `[n]`, ages.

    `advantages`: float32 `[n]`, 0 where the policy did not draw the token. `temperatures`: float32 `[n]`, with which each
    sampled token was drawn, 1 elsewhere; None when all are 1.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    ages: Ages
    advantages: Float32Array
    temperatures: Float32Array | None


def rows_of(groups: Iterable[Group[Trajectory]], policy_version: int, k: int) -> tuple[list[Row], StalenessTally]:
    """The segments that give a gradient, judged for a step from `policy_version` under K; all are counted.

    Where the advantage is 0, or nothing sampled is fresh, the loss is exactly 0: such segments skip both passes.
    """
    rows, tally = [], StalenessTally()
    for group in groups:
        trajectories = [member.payload for member in group.members]
        advantages = grpo([trajectory.reward for trajectory in trajectories])
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            for segment in trajectory.segments:
                if advantage == 0.0:
                    count_only(segment.version_spans, policy_version, k, tally)
                    continue
                tokens = unpack_tokens(segment.token_ids)
                ages = judge(segment.version_spans, len(tokens), policy_version, k, tally)
                if ages.trains:
                    logprobs = unpack_logprobs(segment.logprobs)
                    spread = np.where(ages.values != NOT_SAMPLED, advantage, 0.0).astype(np.float32)
                    temperatures = _temperatures(segment.version_spans, len(tokens), trajectory.samplings)
                    rows.append(Row(tokens, logprobs, ages, spread, temperatures))
    return rows, tally


def _temperatures(
    spans: Sequence[VersionSpan], length: int, samplings: Sequence[SamplingParams]
) -> Float32Array | None:
    """A session's calls may differ in it: the trainer divides each token's logits by its own."""
    if all(sampling.temperature == 1.0 for sampling in samplings):
        return None
    temperatures = np.ones(length, dtype=np.float32)
    for span in spans:
        temperatures[span.start : span.start + span.length] = samplings[span.sampling].temperature
    return temperatures
