"""Shared stems: what rows of a micro-batch have in common at their beginning is computed once.

    rows        p p p a b c │ p p p d e │ p p p a b c │ q q f        siblings share their prompt
    needed      p p p a b   │ p p p d   │ p p p a b   │ q q          nothing is sampled after the last token
    laid        q q │ p p p │ d │ a b                                alone, stems, branches
                      ▲───────┴───┘                                  a branch sees its stem, then itself

Two rows that need the same tokens are one. A stem is all that stands before a row's first sampled token. It is shared only
where that is cheaper (`services.policies.token_budget.worth_sharing`). Pure: the same rows give the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from services.policies.token_budget import worth_sharing
from services.wire.packed import Int32Array
from trainer.algorithms.advantages.batch import Int64Array
from trainer.algorithms.advantages.flat import ranges

Run = tuple[int, int, int]
"""Neighbours that are alike: length, how many, and how many tokens each sees before its own."""


@dataclass(frozen=True)
class Layout:
    """`T` packed tokens, in pieces: those that see nothing before them first, then branches.

    `source` `[T]`: which of the rows' tokens, laid end to end, each is; `positions` `[T]`: its place in its row. `runs`:
    the pieces. `seen`: the packed tokens that each of them sees, one piece after the other: its stem's, then its own.

    `stem`, `first`, `rest`: of each row. Its token `i` is packed at `first + i` where `i < stem`, else at `rest + i`.
    """

    source: Int64Array
    positions: Int64Array
    runs: tuple[Run, ...]
    seen: Int64Array
    stem: Int64Array
    first: Int64Array
    rest: Int64Array

    def packed(self, row: Int64Array, place: Int64Array) -> Int64Array:
        """Where the tokens at `place` of rows `row` are packed."""
        packed: Int64Array = place + np.where(place < self.stem[row], self.first[row], self.rest[row])
        return packed


def share(
    tokens: Int32Array, lengths: Sequence[int], stems: Sequence[int], needed: Sequence[int], width: int
) -> Layout:
    """`tokens`: of the rows, end to end, `lengths` of each. `stems`: how many stand before its first sampled token;
    `needed`: before its last one. `width`: the model's hidden size."""
    ends = np.cumsum(lengths).tolist()
    begins = [end - length for end, length in zip(ends, lengths, strict=True)]
    packed, size = np.ascontiguousarray(tokens).tobytes(), tokens.itemsize
    distinct: dict[tuple[int, bytes], int] = {}
    """The first row of each kind, by its stem and what it needs."""
    kinds = [
        distinct.setdefault((stem, packed[begin * size : (begin + need) * size]), row)
        for row, (begin, stem, need) in enumerate(zip(begins, stems, needed, strict=True))
    ]
    families: dict[bytes, list[int]] = {}
    for (stem, content), row in distinct.items():
        families.setdefault(content[: stem * size], []).append(row)
    whole: list[tuple[int, int]] = []
    """Pieces that begin with a row's first token: length, row."""
    branches: list[tuple[int, int, int, int]] = []
    """The others: stem, length, row, the row whose stem is packed."""
    for members in families.values():
        # The shortest first: where one needs the stem alone, its are the stem's tokens.
        members.sort(key=needed.__getitem__)
        stem = stems[members[0]]
        rests = [needed[row] - stem for row in members]
        if len(members) > 1 and worth_sharing(stem, rests, width):
            whole.append((stem, members[0]))
            branches += [(stem, rest, row, members[0]) for row, rest in zip(members, rests, strict=True) if rest]
        else:
            whole += [(needed[row], row) for row in members]
    whole.sort()
    branches.sort()
    return _lay(whole, branches, begins, kinds)


def _lay(
    whole: list[tuple[int, int]],
    branches: list[tuple[int, int, int, int]],
    begins: list[int],
    kinds: list[int],
) -> Layout:
    """`kinds`: for each row the one that stands for it."""
    stem, first, rest = (np.zeros(len(begins), dtype=np.int64) for _ in range(3))
    packed = 0
    pieces: list[tuple[int, int]] = []
    """Of each piece the token that it begins with, and its length."""
    seen: list[tuple[int, int]] = []
    for length, row in whole:
        pieces.append((begins[row], length))
        seen.append((packed, length))
        stem[row], first[row] = length, packed
        packed += length
    for before, length, row, owner in branches:
        pieces.append((begins[row] + before, length))
        seen += [(int(first[owner]), before), (packed, length)]
        stem[row], first[row], rest[row] = before, first[owner], packed - before
        packed += length
    shapes = [(length, 0) for length, _ in whole] + [(length, before) for before, length, _, _ in branches]
    runs = tuple((length, len(list(alike)), before) for (length, before), alike in groupby(shapes))
    source, lengths = _columns(pieces)
    return Layout(
        source=ranges(source, lengths),
        positions=ranges(np.array([before for _, before in shapes], dtype=np.int64), lengths),
        runs=runs,
        seen=ranges(*_columns(seen)),
        stem=stem[kinds],
        first=first[kinds],
        rest=rest[kinds],
    )


def _columns(pieces: list[tuple[int, int]]) -> tuple[Int64Array, Int64Array]:
    starts, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
    return starts, lengths
