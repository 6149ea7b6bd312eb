"""Sequence packing: rows become micro-batches of tensors, each one packed row without padding.

Row a segment (`trainer.data.rows`) ──split by tokens (`services.policies.token_budget`)──► MicroBatch × m, on each rank

tokens      p  p  p  s  s  e  s │ p  p  s        p prompt, s sampled, e environment
sampled     0  0  0  1  1  0  1 │ 0  0  1        M of them
fresh       0  0  0  1  0  0  1 │ 0  0  1        N of those: staleness ≤ K
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.policies.token_budget import fill_sharing, split_rows
from services.wire.packed import Float32Array, Int32Array
from trainer.algorithms.advantages.batch import Int64Array
from trainer.algorithms.advantages.flat import ranges
from trainer.algorithms.losses.tokens import BatchSize
from trainer.data.rows import Row, Rows
from trainer.data.sharing import Layout, by_prefix, share
from trainer.data.staleness import NOT_SAMPLED, Int16Array, StalenessTally


@dataclass(frozen=True)
class SharedStems:
    """Where some rows go on from a stem that stands apart (`trainer.data.sharing`): what each row sees.

    `before`: for each run, how many tokens of a stem its rows see. `seen`: int64, the places of the tokens that a row sees,
    its own included, one row after the other; `starts`: int32 `[rows + 1]`, where those of each begin, and how many they
    are. `longest`: the most that one sees.
    """

    before: tuple[int, ...]
    seen: Tensor
    starts: Tensor
    longest: int


@dataclass(frozen=True)
class PackedRow:
    """`T` tokens of rows laid end to end.

    rows         a b c d │ e f │ g h           lengths (4, 2, 2)
    positions    0 1 2 3 │ 0 1 │ 0 1           restart with each row
    runs         (4, 1) (2, 2)                 neighbours of one length: (length, how many)

    `input_ids`, `position_ids`: int64 `[1, T]`. `starts`: int32 `[rows + 1]`, where each begins, and `T`.
    Invariant: Σ length · count over `runs` is `T`. `shared`: None where each row sees itself alone. `needs`: what of the
    rows is needed, None for all. `experts`: int16 `[1, T, layers · top]`, which ones the layers of a mixture are to choose,
    −1 for what they will; None for that everywhere.
    """

    input_ids: Tensor
    position_ids: Tensor
    starts: Tensor
    runs: tuple[tuple[int, int], ...]
    shared: SharedStems | None = None
    needs: Needs | None = None
    experts: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(length for length, _ in self.runs)


@dataclass(frozen=True)
class Condensed:
    """What is needed of a packed row, each part of it once. `places`: int64 `[T]`, where in `row` each token of the packed
    row is computed; beyond its end for those that are not needed."""

    row: PackedRow
    places: Tensor


@dataclass(frozen=True)
class Needs:
    """Of each row of a packed one only some tokens are read: those after which a token was sampled.

    `token_ids`: all rows', end to end; `lengths` `[rows]`. `needed` `[rows]`: how many tokens stand before the last sampled
    one. `contents`: numbers that differ where tokens are not computed alike (`Rows.contents`); `experts` `[T, …]`.
    """

    token_ids: Int32Array
    lengths: Int64Array
    needed: Int64Array
    contents: Int32Array
    experts: Int16Array | None = None
    _condensed: dict[int, Condensed] = field(default_factory=dict, compare=False)
    """By width: several models may compute one batch."""

    def condensed(self, width: int, device: torch.device) -> Condensed:
        """For a model of hidden size `width`, on `device`."""
        if width not in self._condensed:
            layout = share(self.contents, self.lengths.tolist(), self.needed.tolist(), width)
            places = torch.from_numpy(layout.packed).to(device)
            row = lay_shared(layout, self.token_ids, device, self.experts)
            self._condensed[width] = Condensed(row, places)
        return self._condensed[width]


def lay_end_to_end(rows: Sequence[Int32Array], device: torch.device | None = None) -> PackedRow:
    """Rows of at least one token each, in their order. Raises ValueError for none, and for an empty one."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if not len(lengths) or lengths.min() < 1:
        raise ValueError(f"rows of at least one token are wanted, got lengths {lengths.tolist()}")
    return _end_to_end(np.concatenate(rows), lengths, device)


def lay_shared(
    layout: Layout, tokens: Int32Array, device: torch.device | None = None, experts: Int16Array | None = None
) -> PackedRow:
    """As `layout` says. `tokens`, `experts`: of the rows that it is of, end to end."""
    own, counts, before = (np.array(column, dtype=np.int64) for column in zip(*layout.runs, strict=True))
    shared = SharedStems(
        before=tuple(before.tolist()),
        seen=torch.from_numpy(layout.seen).to(device),
        starts=_starts(np.repeat(own + before, counts), device),
        longest=int((own + before).max()),
    )
    return PackedRow(
        input_ids=torch.from_numpy(tokens[layout.source].astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(layout.positions)[None].to(device),
        starts=_starts(np.repeat(own, counts), device),
        runs=tuple((length, count) for length, count, _ in layout.runs),
        shared=shared if before.any() else None,
        experts=None if experts is None else torch.from_numpy(experts[layout.source])[None].to(device),
    )


def _end_to_end(
    tokens: Int32Array,
    lengths: Int64Array,
    device: torch.device | None,
    needs: Needs | None = None,
    experts: Int16Array | None = None,
) -> PackedRow:
    return PackedRow(
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(ranges(np.zeros_like(lengths), lengths))[None].to(device),
        starts=_starts(lengths, device),
        runs=tuple((length, len(list(run))) for length, run in groupby(lengths.tolist())),
        needs=needs,
        experts=None if experts is None else torch.from_numpy(np.ascontiguousarray(experts))[None].to(device),
    )


def _starts(lengths: Int64Array, device: torch.device | None) -> Tensor:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts).to(device)


@dataclass(frozen=True)
class KeptTokens:
    """What each of `M` tokens was sampled from: `counts` int64 `[M]`, 0 for all there are; `ids` int64 `[Σ counts]`."""

    counts: Tensor
    ids: Tensor

    def take(self, chosen: Tensor) -> KeptTokens:
        """Of these tokens, in this order."""
        counts = self.counts[chosen]
        begins = self.counts.cumsum(0)[chosen] - counts
        inside = torch.arange(int(counts.sum()), device=counts.device)
        places = torch.repeat_interleave(begins - (counts.cumsum(0) - counts), counts) + inside
        return KeptTokens(counts, self.ids[places])


@dataclass(frozen=True)
class MicroBatch:
    """Segments that share a forward pass: `row`, and what is known of their tokens, flat, in the order of `row`.

    Of the `M` sampled ones: `places` int64, where each lies in `row`; `behaviour` float32; `current` bool, as
    `trainer.data.staleness.Ages` has it; `temperature` float32, None when all are 1; `kept`, None when nothing was cut.

    Of the `N` fresh ones, staleness ≤ K: `chosen` int64, which of the M each is; `segment` int64, of which of the
    `segments`; `staleness` float32, in optimizer steps; `advantages` float32. With a critic also `values` and `returns`,
    with a teacher `teacher`, float32, as `trainer.data.rows.Row` has them.

    Of the segments: `group` int64 `[segments]`, the number of each one's group in the step; `right` bool `[segments]`, of a
    right answer, None where nobody says what that is.
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
    group: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None
    teacher: Tensor | None = None
    right: Tensor | None = None
    kept: KeptTokens | None = None
    replayed: int = 0
    """How many of the M are computed with the experts that the engine chose for the token before."""

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of the pass (`idle_pass`)."""
        return not self.segments


@dataclass(frozen=True)
class PackedBatch:
    """One rank's passes of a batch. `size`: of the whole batch, skipped segments included: what the loss is a mean of.

    `fresh`: tokens of all passes that may enter the loss, those of other ranks too. All ranks have equally many passes;
    some may be idle (`idle_pass`).
    """

    micro_batches: list[MicroBatch]
    size: BatchSize
    fresh: int


@dataclass(frozen=True)
class SharedBatch:
    """A batch as ranks share it: `shares` has the rows of each pass of each share of the ranks; None for an idle pass."""

    shares: list[list[Rows | None]]
    size: BatchSize
    fresh: int

    @property
    def sources(self) -> list[Int64Array]:
        """Of each share, the numbers of its rows' segments, in the order of its passes."""
        none = np.zeros(0, dtype=np.int64)
        return [
            np.concatenate([none, *[rows.segment for rows in passes if rows is not None and rows.segment is not None]])
            for passes in self.shares
        ]

    def packed(self, share: int, device: torch.device | None = None, stem_width: int | None = None) -> PackedBatch:
        """The passes of one share, as tensors on `device`."""
        passes = lay_passes(self.shares[share], device, stem_width)
        return PackedBatch(passes, self.size, self.fresh)


def pack(
    rows: Sequence[Row],
    tally: StalenessTally,
    budget: int,
    device: torch.device | None = None,
    stem_width: int | None = None,
) -> PackedBatch:
    """Pack rows into micro-batches of at most `budget` tokens, for one rank; a longer row has one for itself.

    `stem_width`: of the model, as `split_batch` has it.
    """
    return share_out(rows, tally, budget, stem_width).packed(0, device, stem_width)


def share_out(
    rows: Sequence[Row], tally: StalenessTally, budget: int, stem_width: int | None = None, shares: int = 1
) -> SharedBatch:
    """Give the rows out to `shares` ranks, balanced by tokens, each rank's in passes of at most `budget` tokens."""
    if not len(rows):
        return SharedBatch([[]] * shares, BatchSize(tokens=tally.fresh, segments=tally.segments), 0)
    flat = Rows.joined(rows)
    right, fresh = 0, flat.ages >= 0
    if flat.right is not None:
        right = int(np.count_nonzero(fresh & np.repeat(flat.right, flat.lengths)))
    size = BatchSize(tokens=tally.fresh, segments=tally.segments, right=right)
    parts = [
        [flat.take(np.array(together)) if together else None for together in passes]
        for passes in split_shares(flat, budget, stem_width, shares)
    ]
    return SharedBatch(parts, size, int(np.count_nonzero(fresh)))


def lay_passes(
    passes: Sequence[Rows | None], device: torch.device | None = None, stem_width: int | None = None
) -> list[MicroBatch]:
    """The micro-batches of one rank: idle ones for None."""
    micro_batches = [idle_pass(device) if rows is None else micro_batch(rows, device) for rows in passes]
    for micro in micro_batches:
        if micro.row.needs is not None and stem_width is not None and device is not None:
            # Now, while another batch may be training, and not in the pass.
            micro.row.needs.condensed(stem_width, device)
    return micro_batches


def split_batch(rows: Rows, budget: int, stem_width: int | None = None) -> list[list[int]]:
    """Which rows stand in one pass of at most `budget` tokens, on one rank.

    `stem_width`: the model's hidden size, where prefixes are computed once: then rows that begin alike stay together, and a
    pass counts what is computed. None where each row is computed whole.
    """
    return split_shares(rows, budget, stem_width, 1)[0]


def split_shares(rows: Rows, budget: int, stem_width: int | None, shares: int) -> list[list[list[int]]]:
    """The same for each of several ranks, which have equally many passes; some may be empty."""
    if stem_width is None:
        return split_rows(rows.lengths.tolist(), budget, ranks=shares)
    begins = rows.begins
    # The last sampled token of each row; a row without one is computed whole.
    places = np.where(rows.ages != NOT_SAMPLED, np.arange(len(rows.ages)), -1)
    last = np.maximum.reduceat(places, begins) - begins
    needed = np.where(last > 0, last, rows.lengths).tolist()
    order, common = by_prefix(rows.contents, begins.tolist(), needed)
    return fill_sharing(order, common, needed, budget, stem_width, ranks=shares)


def idle_pass(device: torch.device | None = None) -> MicroBatch:
    """Of a rank without rows, while others compute theirs: weights are sharded, so all ranks take part in each pass.

    Two tokens, of which none was sampled.
    """
    nothing, none = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    return MicroBatch(
        row=lay_end_to_end([np.zeros(2, dtype=np.int32)], device),
        segments=0,
        places=none,
        behaviour=nothing,
        current=torch.empty(0, dtype=torch.bool, device=device),
        temperature=None,
        chosen=none,
        segment=none,
        staleness=nothing,
        advantages=nothing,
        group=none,
        values=nothing,
        returns=nothing,
    )


def micro_batch(rows: Sequence[Row], device: torch.device | None = None) -> MicroBatch:
    """These rows, in their order, in one pass. Raises ValueError for none, and for one that begins with a sampled token."""
    if not len(rows):
        raise ValueError("a pass without a row")
    flat = Rows.joined(rows)
    ages, begins, lengths = flat.ages, flat.begins, flat.lengths
    if (ages[begins] != NOT_SAMPLED).any():
        raise ValueError("a row begins with a sampled token: there is nothing that it was sampled after")
    sampled, fresh = np.flatnonzero(ages != NOT_SAMPLED), np.flatnonzero(ages >= 0)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    of, place = owner[sampled], sampled - begins[owner[sampled]]

    def tensor(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    kept = None if flat.kept is None else flat.kept.take(sampled)
    replayed = 0 if flat.experts is None else int(np.count_nonzero(flat.experts[sampled - 1, 0] >= 0))

    def of_fresh(column: Float32Array | None) -> Tensor | None:
        return None if column is None else tensor(column[fresh])

    return MicroBatch(
        row=_end_to_end(flat.token_ids, lengths, device, _needs(flat, of, place), flat.experts),
        segments=len(lengths),
        places=tensor(sampled),
        behaviour=tensor(flat.logprobs[sampled]),
        current=tensor((ages[sampled] == 0) & (place < flat.current_until[of])),
        temperature=None if flat.temperatures is None else tensor(flat.temperatures[sampled]),
        chosen=tensor(np.flatnonzero(ages[sampled] >= 0)),
        segment=tensor(owner[fresh]),
        staleness=tensor(ages[fresh].astype(np.float32)),
        advantages=tensor(flat.advantages[fresh]),
        group=tensor(flat.group),
        right=None if flat.right is None else tensor(flat.right),
        values=of_fresh(flat.values),
        returns=of_fresh(flat.returns),
        teacher=of_fresh(flat.teacher),
        kept=None
        if kept is None
        else KeptTokens(tensor(kept.counts.astype(np.int64)), tensor(kept.ids.astype(np.int64))),
        replayed=replayed,
    )


def _needs(rows: Rows, of: Int64Array, place: Int64Array) -> Needs | None:
    """`of`, `place`: the row of each sampled token, and its place there. None where a row has none."""
    counts = np.bincount(of, minlength=len(rows))
    if not counts.all():
        return None
    needed = place[np.cumsum(counts) - 1]
    return Needs(rows.token_ids, rows.lengths, needed, rows.contents, rows.experts)
