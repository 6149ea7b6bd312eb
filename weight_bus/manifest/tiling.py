"""Whether runs of bytes hold a tensor exactly once. Pure: for manifests that may come from an attacker.

    stride S   │ a a a b b │      Runs that are S apart are a rectangle in rows of S bytes; a range without a stride is
               │ a a a b b │      whole rows, or a part of one. Rectangles hold every byte once if, wherever some end,
               │ c c d d d │      others begin that fill exactly their columns.

Each rectangle is looked at twice, whatever their number and size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Runs = tuple[int, int, int, int]
"""First byte, bytes of a run, bytes from one run to the next, number of runs."""
_Columns = list[tuple[int, int]]


def why_not_exact(nbytes: int, held: Sequence[Runs]) -> str | None:
    """None where each of `nbytes` bytes is held by exactly one of `held`, else what is wrong.

    Each of `held` has positive counts and begins at 0 or later; its stride is no smaller than its run.
    """
    found = sum(run * count for _, run, _, count in held)
    if found != nbytes:
        return f"hold {found} of {nbytes} bytes"
    width = next((stride for _, _, stride, count in held if count > 1), nbytes)
    if not nbytes:
        return None
    if nbytes % width:
        return f"have a stride of {width}, which {nbytes} bytes are no multiple of"
    begins, ends = defaultdict[int, _Columns](list), defaultdict[int, _Columns](list)
    for start, run, stride, count in held:
        rectangle = _rectangle(width, start, run, stride, count)
        if rectangle is None:
            return f"are ranges of different strides ({count} runs of {run} bytes, {stride} apart, in rows of {width})"
        first, rows, left, right = rectangle
        begins[first].append((left, right))
        ends[first + rows].append((left, right))
    rows = nbytes // width
    # What ends above the first row and begins below the last one is everything.
    ends[0].append((0, width))
    begins[rows].append((0, width))
    for row in sorted(begins.keys() | ends.keys()):
        ended, begun = _joined(ends[row]), _joined(begins[row])
        if begun is None or ended is None:
            return f"have some of the bytes {row * width} to {min(row + 1, rows) * width} twice"
        if begun != ended:
            return f"lack, or have twice, some of the bytes {row * width} to {min(row + 1, rows) * width}"
    return None


def _rectangle(width: int, start: int, run: int, stride: int, count: int) -> tuple[int, int, int, int] | None:
    """First row, number of rows, first column and the one after the last; None for what is no rectangle."""
    row, left = divmod(start, width)
    if count == 1 and left == 0 and run % width == 0:
        return row, run // width, 0, width
    if left + run > width or (count > 1 and stride != width):
        return None
    return row, count, left, left + run


def _joined(columns: Iterable[tuple[int, int]]) -> _Columns | None:
    """Ranges with their neighbours joined, in order; None where two overlap."""
    joined: _Columns = []
    for left, right in sorted(columns):
        if joined and left < joined[-1][1]:
            return None
        if joined and left == joined[-1][1]:
            joined[-1] = (joined[-1][0], right)
        else:
            joined.append((left, right))
    return joined
