"""A batch of groups becomes padded micro-batches of tensors.

Group[Trajectory] ──rows_of──► Row a segment ──pack──► MicroBatch × m        rows sorted by length, padded on the right

tokens      p  p  p  s  s  e  s  _  _        p prompt, s sampled, e environment, _ padding
sampled     0  0  0  1  1  0  1  0  0
fresh       0  0  0  1  0  0  1  0  0        … and staleness ≤ K
columns              └─ first … T − 1 ─┘     only these are kept: before `first` no row has anything sampled
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.policies.batching import Group
from services.wire.packed import Float32Array, Int32Array, unpack_logprobs, unpack_tokens
from services.wire.trajectory import Trajectory
from trainer.advantages import grpo
from trainer.window import Ages, StalenessTally, judge


@dataclass(frozen=True)
class Row:
    """One segment of `n` tokens: ids int32 `[n]`, behaviour logprobs float32 `[n]` (0 where not sampled), ages."""

    token_ids: Int32Array
    logprobs: Float32Array
    ages: Ages
    advantage: float
    temperature: float

    @property
    def trains(self) -> bool:
        """Whether any gradient comes of it. The loss of the others is exactly 0, so they skip both passes."""
        return self.advantage != 0.0 and bool(self.ages.fresh.any())


@dataclass(frozen=True)
class MicroBatch:
    """`B` rows padded to `T` tokens; the other tensors are `[B, W]` over the columns `first … T − 1`, `W = T − first`.

    `input_ids` int64 `[B, T]`. `behaviour` float32. `fresh`, `sampled`, `current` bool (see `trainer.window.Ages`).
    `advantages` float32 `[B, 1]`. `temperature` float32 `[B, 1]`, None when all are 1.
    """

    input_ids: Tensor
    first: int
    behaviour: Tensor
    fresh: Tensor
    sampled: Tensor
    current: Tensor
    advantages: Tensor
    temperature: Tensor | None


@dataclass(frozen=True)
class PackedBatch:
    """`tokens`: fresh sampled tokens of the whole batch, skipped rows included: the loss's denominator."""

    micro_batches: list[MicroBatch]
    tokens: int
    tally: StalenessTally


def rows_of(groups: Iterable[Group[Trajectory]], policy_version: int, k: int) -> tuple[list[Row], StalenessTally]:
    """Every segment of every trajectory, with its advantage, judged for a step from `policy_version` under K."""
    rows, tally = [], StalenessTally()
    for group in groups:
        trajectories = [member.payload for member in group.members]
        advantages = grpo([trajectory.reward for trajectory in trajectories])
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            for segment in trajectory.segments:
                tokens = unpack_tokens(segment.token_ids)
                ages = judge(segment.version_spans, len(tokens), policy_version, k, tally)
                logprobs = unpack_logprobs(segment.logprobs)
                rows.append(Row(tokens, logprobs, ages, advantage, trajectory.sampling.temperature))
    return rows, tally


def pack(
    rows: Sequence[Row], tally: StalenessTally, micro_batch: int, padding: int, device: torch.device | None = None
) -> PackedBatch:
    """Pack the rows that train into micro-batches of at most `micro_batch` rows, neighbours of like length."""
    training = sorted((row for row in rows if row.trains), key=lambda row: len(row.token_ids))
    chunks = [training[start : start + micro_batch] for start in range(0, len(training), micro_batch)]
    return PackedBatch([_micro_batch(chunk, padding, device) for chunk in chunks], tally.fresh, tally)


def _micro_batch(rows: Sequence[Row], padding: int, device: torch.device | None) -> MicroBatch:
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    ids = np.full(shape, padding, dtype=np.int64)
    behaviour = np.zeros(shape, dtype=np.float32)
    ages = np.full(shape, -1, dtype=np.int16)
    fresh, current = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        ids[index, :length] = row.token_ids
        behaviour[index, :length] = row.logprobs
        ages[index, :length] = row.ages.staleness
        fresh[index, :length] = row.ages.fresh
        current[index, :length] = row.ages.current
    sampled = ages >= 0
    first = max(1, int(sampled.any(axis=0).argmax()))
    temperatures = np.array([[row.temperature] for row in rows], dtype=np.float32)
    advantages = np.array([[row.advantage] for row in rows], dtype=np.float32)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        input_ids=tensor(ids),
        first=first,
        behaviour=tensor(behaviour[:, first:]),
        fresh=tensor(fresh[:, first:]),
        sampled=tensor(sampled[:, first:]),
        current=tensor(current[:, first:]),
        advantages=tensor(advantages),
        temperature=None if (temperatures == 1.0).all() else tensor(temperatures),
    )
