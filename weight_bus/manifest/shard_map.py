"""Which bytes of an owner's arena are which bytes of the layout; copies between the two. numpy, no torch.

    layout   … │ a a b b │ a a b b │ a a b b │ …        tensor in rows of 4, columns over two owners
    arena a        │ a a a a a a │                      ShardPiece: 3 runs of 2 bytes, 4 apart in the tensor

A range of the layout cuts a strided shard into at most three pieces: a part of a run, whole runs, a part of a run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_bus.manifest.layout import bucket_pieces
from weight_bus.manifest.manifest import Layout, Shard

Bytes = NDArray[np.uint8]
MERGED_GAP = 4096
"""Padding of an arena that is read rather than skipped: a large tensor may begin half a page later."""


@dataclass(frozen=True)
class ShardPiece:
    """`count` runs of `run` bytes: together from byte `arena` of an arena on, in the tensor `stride` bytes apart."""

    tensor: int
    tensor_offset: int
    arena: int
    run: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.run * self.count

    @property
    def span(self) -> int:
        """Bytes of the tensor from the first run's first to the last one's last."""
        return (self.count - 1) * self.stride + self.run

    def split(self, most: int) -> Iterator[ShardPiece]:
        """Parts of at most `most` bytes each, or of one run."""
        step = max(1, most // self.run)
        for first in range(0, self.count, step):
            yield ShardPiece(
                self.tensor,
                self.tensor_offset + first * self.stride,
                self.arena + first * self.run,
                self.run,
                self.stride,
                min(step, self.count - first),
            )


class ShardMap:
    """Of one owner, for ranges of the layout and of its arena. `shards` None: the arena is the layout."""

    def __init__(self, layout: Layout, shards: list[Shard] | None) -> None:
        self._layout = layout
        self._by_tensor = None if shards is None else sorted(shards, key=lambda one: (one.tensor, one.tensor_offset))
        self._by_arena = None if shards is None else sorted(shards, key=lambda one: one.offset)

    def within(self, offset: int, length: int) -> list[ShardPiece]:
        """What this owner holds of `length` bytes from `offset` of the layout, in the order of its first bytes there."""
        pieces = bucket_pieces(self._layout, offset, length)
        if self._by_tensor is None:
            return [
                ShardPiece(one.tensor, one.tensor_offset, offset + one.bucket_offset, one.length, one.length, 1)
                for one in pieces
            ]
        found: list[ShardPiece] = []
        for piece in pieces:
            first = bisect_left(self._by_tensor, piece.tensor, key=lambda shard: shard.tensor)
            for number in range(first, len(self._by_tensor)):
                shard = self._by_tensor[number]
                if shard.tensor != piece.tensor:
                    break
                found += _cut(shard, piece.tensor_offset, piece.tensor_offset + piece.length)
        return found

    def in_arena(self, offset: int, length: int) -> list[ShardPiece]:
        """Where `length` bytes from `offset` of the arena belong; what is left out is padding."""
        if self._by_arena is None:
            return self.within(offset, length)
        found: list[ShardPiece] = []
        first = max(0, bisect_right(self._by_arena, offset, key=lambda shard: shard.offset) - 1)
        for number in range(first, len(self._by_arena)):
            shard = self._by_arena[number]
            if shard.offset >= offset + length:
                break
            found += _cut_arena(shard, offset, offset + length)
        return found


def merged(pieces: Iterable[ShardPiece], most: int) -> list[tuple[int, int, list[ShardPiece]]]:
    """Ranges `start, stop` of the arena, and the pieces that lie in each: neighbours together, up to `most` bytes."""
    ranges: list[tuple[int, int, list[ShardPiece]]] = []
    for piece in sorted(pieces, key=lambda piece: piece.arena):
        end = piece.arena + piece.nbytes
        if ranges and piece.arena - ranges[-1][1] <= MERGED_GAP and end - ranges[-1][0] <= most:
            start, _, held = ranges[-1]
            ranges[-1] = (start, end, [*held, piece])
        else:
            ranges.append((piece.arena, end, [piece]))
    return ranges


def scatter(piece: ShardPiece, source: Bytes, arena: int, target: Bytes, tensor_offset: int) -> None:
    """Copy the piece from `source`, which holds an arena from its byte `arena` on, to where it belongs in `target`, which
    holds the tensor from its byte `tensor_offset` on.
    """
    start = piece.arena - arena
    runs = source[start : start + piece.nbytes].reshape(piece.count, piece.run)
    begin = piece.tensor_offset - tensor_offset
    place = target[begin : begin + piece.span]
    if len(place) != piece.span:
        raise ValueError(f"{piece} lies outside the {len(target)} bytes from {tensor_offset}")
    np.lib.stride_tricks.as_strided(place, (piece.count, piece.run), (piece.stride, 1))[:] = runs


def _cut(shard: Shard, low: int, high: int) -> Iterator[ShardPiece]:
    """What of a shard lies in the tensor's bytes `low` to `high`."""
    run, stride, count = shard.runs
    start = shard.tensor_offset
    first = max(0, (low - start - run) // stride + 1)
    after = min(count, -(-(high - start) // stride))
    if first >= after:
        return
    skipped = max(0, low - start - first * stride)
    left_out = max(0, start + (after - 1) * stride + run - high)
    yield from _pieces(shard, first, after, skipped, left_out)


def _cut_arena(shard: Shard, low: int, high: int) -> Iterator[ShardPiece]:
    """What of a shard lies in the arena's bytes `low` to `high`."""
    run, _, _ = shard.runs
    begin, end = max(low - shard.offset, 0), min(high - shard.offset, shard.nbytes)
    if begin < end:
        first, after = begin // run, -(-end // run)
        yield from _pieces(shard, first, after, begin - first * run, after * run - end)


def _pieces(shard: Shard, first: int, after: int, skipped: int, left_out: int) -> Iterator[ShardPiece]:
    """The runs `first` to `after`, without so many bytes at the first one's beginning and the last one's end."""
    run, stride, _ = shard.runs

    def piece(number: int, skip: int, length: int, count: int) -> ShardPiece:
        begin = shard.tensor_offset + number * stride + skip
        apart = stride if count > 1 else length
        return ShardPiece(shard.tensor, begin, shard.offset + number * run + skip, length, apart, count)

    if after - first == 1:
        yield piece(first, skipped, run - skipped - left_out, 1)
        return
    if skipped:
        yield piece(first, skipped, run - skipped, 1)
        first += 1
    whole = after - 1 if left_out else after
    if whole > first:
        yield piece(first, 0, run, whole - first)
    if left_out:
        yield piece(after - 1, 0, run - left_out, 1)
