"""Sequence packing: rows become micro-batches of tensors, each one packed row without padding.

Row a segment (`trainer.data.rows`) ──split by tokens (`services.policies.token_budget`)──► MicroBatch × m

tokens      p  p  p  s  s  e  s │ p  p  s        p prompt, s sampled, e environment
sampled     0  0  0  1  1  0  1 │ 0  0  1        M of them
fresh       0  0  0  1  0  0  1 │ 0  0  1        N of those: staleness ≤ K
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.policies.token_budget import split_rows
from services.wire.packed import Int32Array
from trainer.algorithms.losses.tokens import BatchSize
from trainer.data.rows import Row
from trainer.data.staleness import NOT_SAMPLED, StalenessTally


@dataclass(frozen=True)
class PackedRow:
    """`T` tokens of rows laid end to end.

    rows         a b c d │ e f │ g h           lengths (4, 2, 2)
    positions    0 1 2 3 │ 0 1 │ 0 1           restart with each row
    runs         (4, 1) (2, 2)                 neighbours of one length: (length, how many)

    `input_ids`, `position_ids`: int64 `[1, T]`. `starts`: int32 `[rows + 1]`, where each begins, and `T`.
    Invariant: Σ length · count over `runs` is `T`.
    """

    input_ids: Tensor
    position_ids: Tensor
    starts: Tensor
    runs: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(length for length, _ in self.runs)


def lay_end_to_end(rows: Sequence[Int32Array], device: torch.device | None = None) -> PackedRow:
    """Rows of at least one token each, in their order. Raises ValueError for none, and for an empty one."""
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"rows of at least one token are wanted, got lengths {lengths}")
    return PackedRow(
        input_ids=torch.from_numpy(np.concatenate(rows).astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None].to(device),
        starts=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
        runs=tuple((length, len(list(run))) for length, run in groupby(lengths)),
    )


Column = Callable[[Row], npt.NDArray[Any]]
"""What a row says of each of its tokens: `[n]`."""


@dataclass(frozen=True)
class MicroBatch:
    """Segments that share a forward pass: `row`, and what is known of their tokens, flat, in the order of `row`.

    Of the `M` sampled ones: `places` int64, where each lies in `row`; `behaviour` float32; `current` bool, as
    `trainer.data.staleness.Ages` has it; `temperature` float32, None when all are 1.

    Of the `N` fresh ones, staleness ≤ K: `chosen` int64, which of the M each is; `segment` int64, of which of the
    `segments`; `staleness` float32, in optimizer steps; `advantages` float32. With a critic also `values` and `returns`,
    float32, as `trainer.data.rows.Row` has them.
    """

    row: PackedRow
    segments: int
    places: Tensor
    behaviour: Tensor
    current: Tensor
    temperature: Tensor | None
    chosen: Tensor
    segment: Tensor
    staleness: Tensor
    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True)
class PackedBatch:
    """`size`: of the whole batch, skipped segments included: what the loss is a mean of."""

    micro_batches: list[MicroBatch]
    size: BatchSize
    tally: StalenessTally


def pack(rows: Sequence[Row], tally: StalenessTally, budget: int, device: torch.device | None = None) -> PackedBatch:
    """Pack rows into micro-batches of at most `budget` tokens; a longer row has one for itself."""
    split = split_rows([len(row.token_ids) for row in rows], budget)[0]
    size = BatchSize(tokens=tally.fresh, segments=tally.segments)
    return PackedBatch([micro_batch([rows[index] for index in together], device) for together in split], size, tally)


def micro_batch(rows: Sequence[Row], device: torch.device | None = None) -> MicroBatch:
    """These rows, in their order, in one pass. Raises ValueError for none, and for one that begins with a sampled token."""
    if any(row.ages.values[0] != NOT_SAMPLED for row in rows):
        raise ValueError("a row begins with a sampled token: there is nothing that it was sampled after")
    ages = np.concatenate([row.ages.values for row in rows])
    sampled = ages != NOT_SAMPLED

    def of_sampled(column: Column, dtype: npt.DTypeLike = np.float32) -> Tensor:
        return tensor(np.concatenate([column(row) for row in rows])[sampled].astype(dtype))

    def of_fresh(column: Column) -> Tensor:
        return tensor(np.concatenate([column(row) for row in rows])[ages >= 0].astype(np.float32))

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    warm = any(row.temperatures is not None for row in rows)
    segment = np.repeat(np.arange(len(rows)), [len(row.token_ids) for row in rows])
    return MicroBatch(
        row=lay_end_to_end([row.token_ids for row in rows], device),
        segments=len(rows),
        places=tensor(np.flatnonzero(sampled)),
        behaviour=of_sampled(lambda row: row.logprobs),
        current=of_sampled(_current, np.bool_),
        temperature=of_sampled(_temperatures) if warm else None,
        chosen=tensor(np.flatnonzero(ages[sampled] >= 0)),
        segment=tensor(segment[ages >= 0]),
        staleness=tensor(ages[ages >= 0].astype(np.float32)),
        advantages=of_fresh(lambda row: row.advantages),
        values=None if rows[0].values is None else of_fresh(lambda row: _known(row.values)),
        returns=None if rows[0].returns is None else of_fresh(lambda row: _known(row.returns)),
    )


def _current(row: Row) -> npt.NDArray[Any]:
    current: npt.NDArray[Any] = (row.ages.values == 0) & (np.arange(len(row.token_ids)) < row.ages.current_until)
    return current


def _temperatures(row: Row) -> npt.NDArray[Any]:
    return np.ones(len(row.token_ids), dtype=np.float32) if row.temperatures is None else row.temperatures


def _known(column: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    if column is None:
        raise ValueError("some rows were given advantages with a critic's values and some were not")
    return column
