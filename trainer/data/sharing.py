"""Shared prefixes: what rows of a micro-batch have in common at their beginning is computed once.

    rows        p p p a b c │ p p p a d │ p p p a b c │ q q f        siblings share their prompt, branches what came before
    needed      p p p a b   │ p p p a   │ p p p a b   │ q q          nothing is sampled after the last token
    tree        p p p a ── b                                         what two rows begin with stands once
                q q
    laid        q q │ p p p a │ b                                    pieces: those that begin a row, then the others
                      ▲─────────┘                                    each sees the pieces before it, then itself

Two rows that need the same tokens are one. A prefix is shared where that is cheaper (`services.policies.token_budget`).
Pure: the same rows give the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
    """`T` packed tokens, in pieces: those that see nothing before them first, then the others.

    `source` `[T]`: which of the rows' tokens, laid end to end, each is; `positions` `[T]`: its place in its row. `runs`:
    the pieces. `seen`: the packed tokens that each of them sees, one piece after the other: those before it, then its own.

    `packed`: of the rows' tokens, laid end to end: where each is packed, and `T`, which no token is, where nobody needs it.
    """

    source: Int64Array
    positions: Int64Array
    runs: tuple[Run, ...]
    seen: Int64Array
    packed: Int64Array


@dataclass(eq=False, slots=True)
class _Piece:
    """Tokens `begin … end − 1` of a row, behind those of `parent`, and so behind all that stood before them in it."""

    row: int
    begin: int
    end: int
    parent: _Piece | None
    children: list[_Piece] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    """Rows that need nothing behind it: at most one, but where it stands for several pieces."""
    at: int = 0
    """Where it is packed."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    def way(self) -> list[_Piece]:
        """From a row's first token to this piece."""
        found, each = list[_Piece](), self
        while True:
            found.append(each)
            if each.parent is None:
                return found[::-1]
            each = each.parent


def share(tokens: Int32Array, lengths: Sequence[int], needed: Sequence[int], width: int) -> Layout:
    """`tokens`: of the rows, end to end, `lengths` of each. `needed`: how many stand before its last sampled one.
    `width`: the model's hidden size."""
    begins = (np.cumsum(lengths) - lengths).tolist()
    order, common = by_prefix(tokens, begins, needed)
    # Rows that need the same: the first of them stands for all.
    kinds, rows, same = [0] * len(order), list[int](), list[int]()
    for row, shared in zip(order, common, strict=True):
        if not rows or shared < needed[row] or shared < needed[rows[-1]]:
            rows.append(row)
            same.append(shared)
        kinds[row] = rows[-1]
    roots = _grow(rows, [needed[row] for row in rows], same)
    _keep_what_pays(roots, width)
    pieces = sorted(_all(roots), key=lambda piece: (piece.begin, piece.end, piece.row))
    return _lay(pieces, begins, kinds, lengths, needed)


_ROWS = 256


def by_prefix(tokens: Int32Array, begins: Sequence[int], needed: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows in an order in which those that begin alike are neighbours, and how many tokens each has in common with the one
    before it. `tokens` of all; row `i` has `needed[i]` from `begins[i]` on."""
    size = tokens.itemsize
    data = np.ascontiguousarray(tokens).tobytes()
    contents = [data[begin * size : (begin + need) * size] for begin, need in zip(begins, needed, strict=True)]
    order = sorted(range(len(contents)), key=contents.__getitem__)
    common = [0]
    for start in range(0, len(order) - 1, _ROWS):
        some = order[start : start + _ROWS + 1]
        sizes = np.array([needed[row] for row in some])
        # Behind its tokens each row has what no other has there.
        table = np.full((len(some), int(sizes.max()) + 1), -1, dtype=tokens.dtype)
        table[:, -1] = -2 - np.arange(len(some)) % 2
        table[np.arange(table.shape[1])[None] < sizes[:, None]] = tokens[
            ranges(np.array([begins[row] for row in some]), sizes)
        ]
        common += np.minimum((table[1:] != table[:-1]).argmax(1), np.minimum(sizes[1:], sizes[:-1])).tolist()
    return order, common


def _grow(rows: Sequence[int], sizes: Sequence[int], common: Sequence[int]) -> list[_Piece]:
    """The tree of sorted rows: a piece ends where a row does, and where two part."""
    roots: list[_Piece] = []
    way: list[_Piece] = []
    for row, size, same in zip(rows, sizes, common, strict=True):
        above: _Piece | None = None
        while way and way[-1].end > same:
            above = way.pop()
        if above is not None and same > above.begin:
            stem = _Piece(above.row, above.begin, same, above.parent, [above])
            beside = roots if above.parent is None else above.parent.children
            beside[beside.index(above)] = stem
            above.parent, above.begin = stem, same
            way.append(stem)
        parent = way[-1] if way else None
        leaf = _Piece(row, same, size, parent, closes=[row])
        (roots if parent is None else parent.children).append(leaf)
        way.append(leaf)
    return roots


def _all(roots: Sequence[_Piece]) -> Iterator[_Piece]:
    """Each after its children."""
    waiting = [(piece, False) for piece in reversed(roots)]
    while waiting:
        piece, ready = waiting.pop()
        if ready or not piece.children:
            yield piece
        else:
            waiting.append((piece, True))
            waiting += [(child, False) for child in reversed(piece.children)]


def _keep_what_pays(roots: list[_Piece], width: int) -> None:
    """Pieces that are not worth a place of their own go back into those behind them."""
    saved: dict[_Piece, int] = {}
    for piece in [*_all(roots)]:
        if not piece.children:
            continue
        rests = [child.length for child in piece.children] + [0] * len(piece.closes)
        won = saved_by_sharing(piece.length, rests, width, piece.begin)
        if won > 0:
            saved[piece] = won
        else:
            _dissolve(piece, roots)
    # Pieces of one shape are one call of the attention kernel.
    by_shape: dict[tuple[int, int], int] = {}
    for piece, won in saved.items():
        shape = (piece.begin, piece.length)
        by_shape[shape] = by_shape.get(shape, 0) + won
    poor = [piece for piece in saved if not pays(by_shape[piece.begin, piece.length], 1, width)]
    rich = sum(won for piece, won in saved.items() if piece not in poor)
    for piece in poor:
        _dissolve(piece, roots)
    shapes = {(piece.begin, piece.length) for piece in _all(roots) if piece.begin}
    if not pays(rich, len(shapes), width):
        for piece in [*_all(roots)]:
            if piece.children:
                _dissolve(piece, roots)


def _dissolve(piece: _Piece, roots: list[_Piece]) -> None:
    behind = piece.children
    for child in behind:
        child.parent, child.begin = piece.parent, piece.begin
    if piece.closes:
        behind = [*behind, _Piece(piece.row, piece.begin, piece.end, piece.parent, closes=piece.closes)]
    beside = roots if piece.parent is None else piece.parent.children
    place = beside.index(piece)
    beside[place : place + 1] = behind


def _lay(
    pieces: list[_Piece],
    begins: list[int],
    kinds: list[int],
    lengths: Sequence[int],
    needed: Sequence[int],
) -> Layout:
    """`kinds`: for each row the one that stands for it."""
    total = 0
    for piece in pieces:
        piece.at = total
        total += piece.length
    ways = [piece.way() for piece in pieces]
    starts = _column(begins[piece.row] + piece.begin for piece in pieces)
    sizes, before = _column(piece.length for piece in pieces), _column(piece.begin for piece in pieces)
    seen = _spans(piece for way in ways for piece in way)
    shapes = [(piece.length, piece.begin) for piece in pieces]
    runs = tuple((length, len(list(alike)), before) for (length, before), alike in groupby(shapes))
    # Where the tokens of each row that stands for others are packed, one row after the other.
    first: dict[int, int] = {}
    closing = [(row, way) for piece, way in zip(pieces, ways, strict=True) for row in piece.closes]
    laid = 0
    for row, _ in closing:
        first[row] = laid
        laid += needed[row]
    places = _spans(piece for _, way in closing for piece in way)
    of = np.repeat(np.arange(len(begins)), lengths)
    place, need = np.arange(len(of)) - np.array(begins)[of], np.array(needed)[of]
    at = np.array([first[kind] for kind in kinds])[of] + np.minimum(place, need - 1)
    return Layout(
        source=ranges(starts, sizes),
        positions=ranges(before, sizes),
        runs=runs,
        seen=seen,
        packed=np.where(place < need, places[at], total),
    )


def _spans(pieces: Iterable[_Piece]) -> Int64Array:
    """The packed places of their tokens."""
    spans = np.array([(piece.at, piece.length) for piece in pieces], dtype=np.int64).reshape(-1, 2)
    return ranges(spans[:, 0], spans[:, 1])


def _column(values: Iterable[int]) -> Int64Array:
    return np.array([*values], dtype=np.int64)
