"""Rows become padded micro-batches of tensors.

Row a segment (`trainer.rows`) ──pack──► MicroBatch × m        rows sorted by length, padded on the right

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

from services.wire.packed import Float32Array
from trainer.rows import Row
from trainer.window import NOT_SAMPLED, StalenessTally


@dataclass(frozen=True)
class MicroBatch:
    """`B` rows padded to `T` tokens; the other tensors are `[B, W]` over the columns `first … T − 1`, `W = T − first`.

    `input_ids` int64 `[B, T]`. `behaviour` float32. Bool: `sampled`; of those `fresh`, staleness ≤ K, and `current`, as
    `trainer.window.Ages` has it.
    `temperature` float32 `[B, W]`, None when all are 1.

    The `N` fresh tokens, flat, row by row: `places` int64 `[N]` says where each lies in a tensor `[B · W]`, `rows` int64
    `[N]` in which row, `staleness` float32 `[N]` how many optimizer steps it is old, `advantages` float32 `[N]`.
    With a critic also `values` and `returns`, float32 `[N]`, as `trainer.rows.Row` has them.
    """

    input_ids: Tensor
    first: int
    behaviour: Tensor
    fresh: Tensor
    sampled: Tensor
    current: Tensor
    advantages: Tensor
    temperature: Tensor | None
    places: Tensor
    rows: Tensor
    staleness: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True)
class BatchSize:
    """What the loss of a whole batch is a mean of: its fresh tokens, and segments that have any; skipped ones counted."""

    tokens: int
    segments: int


@dataclass(frozen=True)
class PackedBatch:
    """`size`: of the whole batch, skipped segments included: what the loss is a mean of."""

    micro_batches: list[MicroBatch]
    size: BatchSize
    tally: StalenessTally


def pack(
    rows: Iterable[Row], tally: StalenessTally, micro_batch: int, padding: int, device: torch.device | None = None
) -> PackedBatch:
    """Pack rows into micro-batches of at most `micro_batch`, neighbours of like length."""
    ordered = sorted(rows, key=lambda row: len(row.token_ids))
    size = BatchSize(tokens=tally.fresh, segments=tally.segments)
    chunks = [ordered[start : start + micro_batch] for start in range(0, len(ordered), micro_batch)]
    return PackedBatch([_micro_batch(chunk, padding, device) for chunk in chunks], size, tally)


def _micro_batch(rows: Sequence[Row], padding: int, device: torch.device | None) -> MicroBatch:
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    ids = np.full(shape, padding, dtype=np.int64)
    behaviour = np.zeros(shape, dtype=np.float32)
    ages = np.full(shape, NOT_SAMPLED, dtype=np.int16)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        ids[index, :length] = row.token_ids
        behaviour[index, :length] = row.logprobs
        ages[index, :length] = row.ages.values
    sampled = ages != NOT_SAMPLED
    first = max(1, int(sampled.any(axis=0).argmax()))
    ages, sampled = ages[:, first:], sampled[:, first:]
    current_until = np.array([[row.ages.current_until] for row in rows])
    current = (ages == 0) & (np.arange(first, shape[1]) < current_until)
    temperatures = np.ones(shape, dtype=np.float32)
    for index, row in enumerate(rows):
        if row.temperatures is not None:
            temperatures[index, : len(row.temperatures)] = row.temperatures
    temperatures = temperatures[:, first:]
    fresh = ages >= 0
    places = np.flatnonzero(fresh)

    values = None if rows[0].values is None else _fresh([row.values for row in rows], rows)
    returns = None if rows[0].returns is None else _fresh([row.returns for row in rows], rows)

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        input_ids=tensor(ids),
        first=first,
        behaviour=tensor(behaviour[:, first:]),
        fresh=tensor(fresh),
        sampled=tensor(sampled),
        current=tensor(current),
        advantages=tensor(_fresh([row.advantages for row in rows], rows)),
        temperature=None if (temperatures == 1.0).all() else tensor(temperatures),
        places=tensor(places),
        rows=tensor(places // fresh.shape[1]),
        staleness=tensor(ages[fresh].astype(np.float32)),
        values=None if values is None else tensor(values),
        returns=None if returns is None else tensor(returns),
    )


def _fresh(columns: Sequence[Float32Array | None], rows: Sequence[Row]) -> Float32Array:
    """`[N]`: what `columns`, `[n]` a row, say of the fresh tokens."""
    return np.concatenate(
        [column[row.ages.values >= 0] for column, row in zip(columns, rows, strict=True) if column is not None]
    )
