"""Micro-batches by tokens: which rows stand in one forward pass, and on which rank. Pure.

    rows ──longest first, to the rank with least work──► ranks ──by length, while the budget lasts──► micro-batches

A rank's work is Σ n · (12 · width + n) over its rows of n tokens: what a transformer of that width does for a row, in units
of 2 · width multiplications a layer (24 · width² a token for projections and feed-forward, 2 · width · n for causal
attention). Given out longest first to the least loaded (Graham 1969, "Bounds on multiprocessing timing anomalies"), the
most and the least loaded rank differ by at most the costliest row.

All ranks get equally many micro-batches, because each pass is a collective where weights are sharded; some may be empty.
Neighbours in a micro-batch are of like length, which is quickest for attention over packed rows
(`trainer.model.packed_attention`). The same lengths give the same split.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Bin = list[int]
"""Indices of rows, shortest row first."""


def split_rows(lengths: Sequence[int], budget: int, *, ranks: int = 1, width: int = 1024) -> list[list[Bin]]:
    """The micro-batches of each rank: of at most `budget` tokens, or of one longer row alone.

    `lengths`: tokens of each row; `width`: the model's hidden size. Each row is in exactly one. Raises ValueError for a
    budget or a number of ranks below 1.
    """
    if budget < 1 or ranks < 1:
        raise ValueError(f"budget and ranks must be ≥ 1, got {budget} and {ranks}")
    shares = _share(lengths, ranks, width)
    filled = [_fill(share, lengths, budget) for share in shares]
    most = max(len(bins) for bins in filled)
    return [_spread(bins, most) for bins in filled]


def fill_sharing(
    order: Sequence[int], common: Sequence[int], lengths: Sequence[int], budget: int, width: int, *, ranks: int = 1
) -> list[list[Bin]]:
    """The micro-batches of each rank where prefixes are computed once: of at most `budget` computed tokens, or of one
    longer row alone. Ranks have equally many; some may be empty.

    `order`: the rows, those that begin alike side by side; `common`: how many tokens each has in common with the one before
    it; `lengths`: tokens by row. Rows that begin alike stay on one rank, as long as none gets a tenth more than its share.
    """
    most = budget
    while True:
        parts = _families(order, common, lengths, most, width)
        shares = _give_out(parts, ranks)
        loads = [sum(cost for cost, _ in share) for share in shares]
        if ranks == 1 or max(loads) * ranks <= _UNEVEN * sum(loads) or all(len(rows) == 1 for _, rows in parts):
            break
        most = min(most, max(cost for cost, rows in parts if len(rows) > 1)) // 2
    filled = [_first_fit(share, budget) for share in shares]
    passes = max(len(bins) for bins in filled)
    return [bins + [[] for _ in range(passes - len(bins))] for bins in filled]


def _families(
    order: Sequence[int], common: Sequence[int], lengths: Sequence[int], most: int, width: int
) -> list[tuple[int, Bin]]:
    """Rows that share, together while they are at most so many computed tokens; and how many they are."""
    parts: list[tuple[int, Bin]] = []
    for place, (row, same) in enumerate(zip(order, common, strict=True)):
        own = lengths[row]
        rests = [lengths[order[place - 1]] - same, own - same]
        if same and saved_by_sharing(same, rests, width) > 0 and parts[-1][0] + own - same <= most:
            cost, rows = parts[-1]
            parts[-1] = (cost + own - same, [*rows, row])
        else:
            parts.append((own, [row]))
    return parts


def _give_out(parts: Sequence[tuple[int, Bin]], ranks: int) -> list[list[tuple[int, Bin]]]:
    """The largest first, to the rank with the fewest tokens."""
    shares: list[list[tuple[int, Bin]]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for cost, rows in sorted(parts, key=lambda part: -part[0]):
        load, rank = loads[0]
        shares[rank].append((cost, rows))
        heapq.heapreplace(loads, (load + cost, rank))
    return shares


def _first_fit(parts: Sequence[tuple[int, Bin]], budget: int) -> list[Bin]:
    """Where there is room, in the order of `parts`: the largest first."""
    bins: list[Bin] = []
    rooms: list[int] = []
    for cost, rows in parts:
        place = next((place for place, room in enumerate(rooms) if cost <= room), len(bins))
        if place == len(bins):
            bins.append([])
            rooms.append(budget)
        bins[place] += rows
        rooms[place] -= cost
    return bins


def smaller_budget(lengths: Sequence[int], budget: int, *, sharing: bool = False) -> int | None:
    """What to try where a pass of `budget` tokens over such rows does not fit: half of it; None where it held one row.

    `sharing`: prefixes are computed once, so that any two rows that fit alone may stand in one pass.
    """
    if len(lengths) < 2 or budget < (min(lengths) if sharing else sum(sorted(lengths)[:2])):
        return None
    return max(1, min(budget, sum(lengths)) // 2)


def work(length: int, width: int) -> int:
    """What a row of `length` tokens costs, in the units above."""
    return length * (12 * width + length)


_UNEVEN = 1.1
"""The most loaded rank's tokens, of the mean."""
_FETCH_UNITS = 40
"""Fetching keys and values of a token once more, and adding up their gradients, in units of work: moves of memory, which
grow with the width as a unit does."""
_CALL_UNITS = 1 << 20
"""One more call of the attention kernel, forward and backward, in units of work of width 1: it takes as long for any."""


def saved_by_sharing(shared: int, rests: Sequence[int], width: int, before: int = 0) -> int:
    """The work saved by computing `shared` tokens once, from which rows go on with `rests` tokens each (0: one ends there);
    below 0 where that is more work. `before`: tokens that stand before them, and are computed elsewhere.

    It saves the shared tokens in all rows but one. It costs fetching the keys of what stands before for each piece, and
    attention over all pairs of a piece: kernels leave out the later half of them only where a row begins with its first
    token.
    """
    apart = sum(_work_behind(before, shared + rest, width) for rest in rests)
    together = sum(_work_behind(before + shared, rest, width) for rest in rests)
    return apart - together - _work_behind(before, shared, width)


def _work_behind(before: int, length: int, width: int) -> int:
    """Of a piece of `length` tokens that sees `before` others."""
    if not before or not length:
        return work(length, width)
    return length * (12 * width + 2 * (before + length)) + _FETCH_UNITS * (before + length)


def pays(saved: int, calls: int, width: int) -> bool:
    """Whether so much work saved is worth `calls` more calls of the attention kernel."""
    return saved > calls * _CALL_UNITS // width


def _share(lengths: Sequence[int], ranks: int, width: int) -> list[Bin]:
    if ranks == 1:
        return [[*range(len(lengths))]]
    shares: list[Bin] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + work(lengths[index], width), rank))
    return shares


def _fill(rows: Bin, lengths: Sequence[int], budget: int) -> list[Bin]:
    bins: list[Bin] = []
    room = 0
    for index in sorted(rows, key=lambda index: (lengths[index], index)):
        if not bins or lengths[index] > room:
            bins.append([])
            room = budget
        bins[-1].append(index)
        room -= lengths[index]
    return bins


def _spread(bins: list[Bin], count: int) -> list[Bin]:
    """As many as `count`: the fullest are halved, and empty ones added where each holds one row."""
    bins = list(bins)
    while len(bins) < count:
        place = max(range(len(bins)), key=lambda place: len(bins[place]), default=None)
        if place is None or len(bins[place]) < 2:
            return bins + [[] for _ in range(count - len(bins))]
        half = len(bins[place]) // 2
        bins[place : place + 1] = [bins[place][:half], bins[place][half:]]
    return bins
