"""Training rows of a batch: the segments that give a gradient, with the tokens over K left out of the loss.

Group[Trajectory] ──advantage──► segments ──staleness──► Row, or only counted where its loss is exactly 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.config.algorithm import AdvantageSettings
from services.policies.batching import Group
from services.wire.packed import Float32Array, Int32Array, unpack_logprobs, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan
from trainer.algorithms.advantages.compute import AdvantageComputer, Credits
from trainer.data.staleness import Ages, StalenessTally, count_only, judge


@dataclass(frozen=True)
class Row:
    """A segment of `n` tokens that gives a gradient: ids int32 `[n]`, behaviour logprobs float32 `[n]`, ages.

    `advantages`: float32 `[n]`, 0 where the policy did not generate the token. `temperatures`: float32 `[n]`, with
    which each sampled token was sampled, 1 elsewhere; None when all are 1. `values`, `returns`: float32 `[n]`, a
    critic's before the batch and what they should have been; None without a critic.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    ages: Ages
    advantages: Float32Array
    temperatures: Float32Array | None
    values: Float32Array | None = None
    returns: Float32Array | None = None


def rows_of(
    groups: Sequence[Group[Trajectory]],
    policy_version: int,
    k: int,
    credits: Credits | None = None,
    *,
    skip_idle: bool = True,
) -> tuple[list[Row], StalenessTally]:
    """The segments that give a gradient, judged for a step from `policy_version` under K; all that are trained are counted.

    `credits`: of the batch that the groups are of, None for GRPO's; a trajectory without any is left out. With `skip_idle`,
    segments whose advantages are all 0 skip both passes: right where the loss is exactly 0 there. Where nothing is fresh it
    always is.
    """
    credits = AdvantageComputer(AdvantageSettings()).of(groups)[0] if credits is None else credits
    rows, tally = [], StalenessTally()
    for member in (member for group in groups for member in group.members):
        credit = credits.get(member.entry)
        if credit is None:
            continue
        for number, segment in enumerate(member.payload.segments):
            advantages = credit.advantages[number]
            if skip_idle and not advantages.any():
                count_only(segment.version_spans, policy_version, k, tally)
                continue
            ages = judge(segment.version_spans, len(advantages), policy_version, k, tally)
            if ages.trains:
                values = None if credit.values is None else credit.values[number]
                returns = None if credit.returns is None else credit.returns[number]
                rows.append(as_row(segment, member.payload.samplings, ages, advantages, values, returns))
    return rows, tally


def as_row(
    segment: Segment,
    samplings: Sequence[SamplingParams],
    ages: Ages,
    advantages: Float32Array,
    values: Float32Array | None = None,
    returns: Float32Array | None = None,
) -> Row:
    """A segment as a row, whatever it is for."""
    temperatures = _temperatures(segment.version_spans, len(advantages), samplings)
    tokens, logprobs = unpack_tokens(segment.token_ids), unpack_logprobs(segment.logprobs)
    return Row(tokens, logprobs, ages, advantages, temperatures, values, returns)


def _temperatures(
    spans: Sequence[VersionSpan], length: int, samplings: Sequence[SamplingParams]
) -> Float32Array | None:
    """A session's calls may differ in it: the trainer divides each token's logits by its own.

    Greedy tokens' logprobs are of temperature 1 (`services.wire.sampling`).
    """
    if all(sampling.temperature in (0.0, 1.0) for sampling in samplings):
        return None
    temperatures = np.ones(length, dtype=np.float32)
    for span in spans:
        temperatures[span.start : span.start + span.length] = samplings[span.sampling].temperature or 1.0
    return temperatures
