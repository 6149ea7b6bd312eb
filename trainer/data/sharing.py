"""Shared stems: what rows of a micro-batch have in common at their beginning is computed once.

    rows        p p p a b c │ p p p d e │ p p p a b c │ q q f        siblings share their prompt
    needed      p p p a b   │ p p p d   │ p p p a b   │ q q          nothing is sampled after the last token
    laid        q q │ p p p │ d │ a b                                alone, stems, branches
                      ▲───────┴───┘                                  a branch sees its stem, then itself

Two rows that need the same tokens are one. A stem is all that stands before a row's first sampled token. It is shared only
where that is cheaper (`services.policies.token_budget`). Pure: the same rows give the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from services.policies.token_budget import pays, saved_by_sharing
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

    `packed`: of the rows' tokens, laid end to end: where each is packed, and `T`, which no token is, where nobody needs it.
    """

    source: Int64Array
    positions: Int64Array
    runs: tuple[Run, ...]
    seen: Int64Array
    packed: Int64Array


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
    shared = _worth_sharing([*families.values()], stems, needed, width)
    whole: list[tuple[int, int]] = []
    """Pieces that begin with a row's first token: length, row."""
    branches: list[tuple[int, int, int, int]] = []
    """The others: stem, length, row, the row whose stem is packed."""
    for members, shares in zip(families.values(), shared, strict=True):
        if not shares:
            whole += [(needed[row], row) for row in members]
            continue
        # The shortest first: where one needs the stem alone, its are the stem's tokens.
        members.sort(key=needed.__getitem__)
        owner = members[0]
        stem = stems[owner]
        whole.append((stem, owner))
        branches += [(stem, needed[row] - stem, row, owner) for row in members if needed[row] > stem]
    whole.sort()
    branches.sort()
    return _lay(whole, branches, begins, kinds, lengths, needed)


def _worth_sharing(families: list[list[int]], stems: Sequence[int], needed: Sequence[int], width: int) -> list[bool]:
    """Which of these rows, that begin with one stem each, share it."""
    saved = []
    for members in families:
        stem = stems[members[0]]
        saved.append(saved_by_sharing(stem, [needed[row] - stem for row in members], width) if members[1:] else 0)
    chosen = [each > 0 for each in saved]
    shapes = {
        (stems[row], needed[row])
        for members, shares in zip(families, chosen, strict=True)
        if shares
        for row in members
        if needed[row] > stems[row]
    }
    return chosen if pays(sum(each for each in saved if each > 0), len(shapes), width) else [False] * len(families)


def _lay(
    whole: list[tuple[int, int]],
    branches: list[tuple[int, int, int, int]],
    begins: list[int],
    kinds: list[int],
    lengths: Sequence[int],
    needed: Sequence[int],
) -> Layout:
    """`kinds`: for each row the one that stands for it."""
    # Of each row: its token `i` is packed at `first + i` where `i < stem`, else at `rest + i`.
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
    starts, sizes = _columns(pieces)
    of = np.repeat(np.arange(len(begins)), lengths)
    place, kind = np.arange(len(of)) - np.array(begins)[of], np.array(kinds)[of]
    at = place + np.where(place < stem[kind], first[kind], rest[kind])
    return Layout(
        source=ranges(starts, sizes),
        positions=ranges(np.array([before for _, before in shapes], dtype=np.int64), sizes),
        runs=runs,
        seen=ranges(*_columns(seen)),
        packed=np.where(place < np.array(needed)[of], at, packed),
    )


def _columns(pieces: list[tuple[int, int]]) -> tuple[Int64Array, Int64Array]:
    starts, lengths = np.array(pieces, dtype=np.int64).reshape(-1, 2).T
    return starts, lengths
