"""Buckets on their way in: which ranges of which owner's arena are read to where, and what is then hashed.

one owner, whose arena is the layout
    large pieces of contiguous tensors ──► the shadow's own memory
    small ones and padding, together ────► scratch ──► the shadow
several owners
    large ranges ────────────────────────► where they belong
    small ones and strided runs ─────────► scratch ──► where they belong, run by run
    "where they belong": the shadow's own memory; scratch, where a tensor is not contiguous there, or in part
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weight_bus.manifest.layout import Piece
from weight_bus.manifest.shard_map import ShardPiece, merged, scatter
from weight_bus.receiver.buckets import BucketPlan, Memory

_DIRECT_BYTES = 64 << 10
"""Smaller pieces are read together with their neighbours: the fixed cost of a read equals so many bytes."""
_PART_BYTES = 4 << 20
"""Larger pieces are read in parts: between two of them decoding has the whole memory bandwidth."""
_WINDOW_BYTES = 64 << 20
_ZEROS = bytes(4096)


@dataclass(frozen=True)
class Place:
    """Where a piece of a tensor is put together. `kept`: it is the tensor's own memory."""

    piece: Piece
    memory: memoryview
    kept: bool


@dataclass(frozen=True)
class BucketRead:
    """`len(into)` bytes from `offset` of the arena of owner number `owner`; runs in them belong to `places`."""

    owner: int
    offset: int
    into: memoryview
    places: list[tuple[ShardPiece, Place]] = field(default_factory=list)

    def arrived(self) -> None:
        """Put the runs where they belong."""
        if self.places:
            source = np.frombuffer(self.into, np.uint8)
            for piece, place in self.places:
                target = np.frombuffer(place.memory, np.uint8)
                scatter(piece, source, self.offset, target, place.piece.tensor_offset)


class ArrivingBucket(Protocol):
    """Bucket number `index`: `count` reads; `weight` is what it counts for in a window, in bytes."""

    index: int
    scratch_bytes: int
    weight: int
    count: int

    def reads(self, scratch: memoryview) -> list[BucketRead]:
        """Into `scratch`, or the shadow; by owner, each owner's in the order of its arena where it is laid out so."""
        ...

    def content(self) -> Iterator[memoryview]:
        """The bucket's bytes in order, once every read has arrived."""
        ...

    def hand_on(self, memory: Memory) -> None:
        """Copy what is in scratch into the shadow; called once the content was found to be right."""
        ...


def arriving(plan: BucketPlan, index: int, memory: Memory) -> ArrivingBucket:
    """Bucket number `index` of `plan`, on its way into `memory`."""
    return _Whole(plan, index, memory) if plan.shards == [None] else _Sharded(plan, index, memory)


def windows(buckets: Sequence[ArrivingBucket]) -> Iterator[list[ArrivingBucket]]:
    """Buckets in order, as many at once as the bound on scratch memory allows, at least one."""
    window: list[ArrivingBucket] = []
    used = 0
    for bucket in buckets:
        if window and used + bucket.weight > _WINDOW_BYTES:
            yield window
            window, used = [], 0
        window.append(bucket)
        used += bucket.weight
    if window:
        yield window


@dataclass(frozen=True)
class _Part:
    """One read: `length` bytes at `offset` of a bucket. `piece`: the tensor bytes that it is read into; None: scratch."""

    offset: int
    length: int
    piece: Piece | None


class _Whole:
    """Of an arena that is the layout: padding is read too, and hashed as it is."""

    def __init__(self, plan: BucketPlan, index: int, memory: Memory) -> None:
        self.index = index
        self._offset, length = plan.ranges[index]
        self._pieces, self._memory = plan.pieces[index], memory
        self._parts = _parts(self._pieces, length, memory)
        self.scratch_bytes = self.weight = sum(part.length for part in self._parts if part.piece is None)
        self.count = len(self._parts)
        self._data: list[memoryview] = []

    def reads(self, scratch: memoryview) -> list[BucketRead]:
        used = 0
        for part in self._parts:
            into = None if part.piece is None else self._memory.in_place(part.piece)
            if into is None:
                into, used = scratch[used : used + part.length], used + part.length
            self._data.append(into)
        return [
            BucketRead(0, self._offset + part.offset, into) for part, into in zip(self._parts, self._data, strict=True)
        ]

    def content(self) -> Iterator[memoryview]:
        yield from self._data

    def hand_on(self, memory: Memory) -> None:
        for part, data in zip(self._parts, self._data, strict=True):
            if part.piece is None:
                end = part.offset + part.length
                for piece in self._pieces:
                    if part.offset <= piece.bucket_offset < end:
                        start = piece.bucket_offset - part.offset
                        memory.write(piece, data[start : start + piece.length])


class _Sharded:
    """Of several arenas: each owner's part is read as few large ranges, and its runs put in their places."""

    def __init__(self, plan: BucketPlan, index: int, memory: Memory) -> None:
        self.index = index
        offset, self._length = plan.ranges[index]
        self._pieces = plan.pieces[index]
        self._in_place = [memory.in_place(piece) for piece in self._pieces]
        self._direct: list[tuple[int, ShardPiece]] = []
        self._merged: list[tuple[int, int, int, list[ShardPiece]]] = []
        for owner, held in enumerate(plan.maps):
            small: list[ShardPiece] = []
            for piece in held.within(offset, self._length):
                if piece.count > 1 or piece.nbytes < _DIRECT_BYTES:
                    small += piece.split(_PART_BYTES)
                else:
                    self._direct += [(owner, part) for part in _cut(piece)]
            self._merged += [(owner, *found) for found in merged(small, _PART_BYTES)]
        beside = sum(piece.length for piece, own in zip(self._pieces, self._in_place, strict=True) if own is None)
        self.scratch_bytes = beside + sum(stop - start for _, start, stop, _ in self._merged)
        # Buckets are whole when the last owner was read: few of them are under way at once, though they need no scratch.
        self.weight = self.scratch_bytes + self._length
        self.count = len(self._direct) + len(self._merged)
        self._places: list[Place] = []

    def reads(self, scratch: memoryview) -> list[BucketRead]:
        used = 0
        for piece, own in zip(self._pieces, self._in_place, strict=True):
            if own is None:
                self._places.append(Place(piece, scratch[used : used + piece.length], kept=False))
                used += piece.length
            else:
                self._places.append(Place(piece, own, kept=True))
        at = {place.piece.tensor: place for place in self._places}
        found: list[BucketRead] = []
        for owner, part in self._direct:
            place = at[part.tensor]
            start = part.tensor_offset - place.piece.tensor_offset
            found.append(BucketRead(owner, part.arena, place.memory[start : start + part.nbytes]))
        for owner, start, stop, pieces in self._merged:
            into, used = scratch[used : used + stop - start], used + stop - start
            found.append(BucketRead(owner, start, into, [(piece, at[piece.tensor]) for piece in pieces]))
        return sorted(found, key=lambda read: (read.owner, read.offset))

    def content(self) -> Iterator[memoryview]:
        position = 0
        for place in self._places:
            yield from _padding(place.piece.bucket_offset - position)
            yield place.memory
            position = place.piece.bucket_offset + place.piece.length
        yield from _padding(self._length - position)

    def hand_on(self, memory: Memory) -> None:
        for place in self._places:
            if not place.kept:
                memory.write(place.piece, place.memory)


def _padding(length: int) -> Iterator[memoryview]:
    for start in range(0, length, len(_ZEROS)):
        yield memoryview(_ZEROS)[: length - start]


def _cut(piece: ShardPiece) -> Iterator[ShardPiece]:
    """Parts of one run."""
    for start in range(0, piece.run, _PART_BYTES):
        length = min(_PART_BYTES, piece.run - start)
        yield ShardPiece(piece.tensor, piece.tensor_offset + start, piece.arena + start, length, length, 1)


def _parts(pieces: list[Piece], length: int, memory: Memory) -> list[_Part]:
    """The reads of a bucket: large pieces in place, everything between them together."""
    parts: list[_Part] = []
    done = 0
    for piece in pieces:
        if piece.length < _DIRECT_BYTES or memory.in_place(piece) is None:
            continue
        if piece.bucket_offset > done:
            parts.append(_Part(done, piece.bucket_offset - done, None))
        for start in range(0, piece.length, _PART_BYTES):
            parts.append(_of_piece(piece, start, min(_PART_BYTES, piece.length - start)))
        done = piece.bucket_offset + piece.length
    if done < length:
        parts.append(_Part(done, length - done, None))
    return parts


def _of_piece(piece: Piece, start: int, length: int) -> _Part:
    own = Piece(piece.tensor, piece.tensor_offset + start, piece.bucket_offset + start, length)
    return _Part(own.bucket_offset, length, own)
