"""Staging: pull a version's buckets into shadow memory, dense or as a delta, and verify their hashes.

    sources ── read_many ──► the shadow's own memory, or scratch ──► the shadow      `weight_bus.receiver.arriving`
    every byte of a bucket there? ──► hash ──► as the manifest says, or StageError

Where the transport can, the next bytes are in flight while a bucket is hashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from blake3 import blake3

from weight_bus.errors import StageError, TransportError
from weight_bus.manifest.delta import DecodedDelta, Words, decode
from weight_bus.manifest.layout import Piece, hash_bytes
from weight_bus.manifest.manifest import Delta, DeltaBucket, Source
from weight_bus.manifest.shard_map import ShardPiece
from weight_bus.memory.throttle import CpuThrottle
from weight_bus.receiver.arriving import ArrivingBucket, arriving, windows
from weight_bus.receiver.buckets import Memory, bucket_hash
from weight_bus.receiver.job import StageJob, check_hash
from weight_bus.receiver.slices import Offsets
from weight_bus.receiver.sources import SourceReads, Tagged, sources_in_reach
from weight_bus.transports.base import Reader


class DenseStage:
    """Pulls a manifest's dense bytes. Raises StageError, before it writes, where an owner has no readable source."""

    def __init__(self, job: StageJob) -> None:
        self._job = job
        self._plan = job.plan
        self._throttle = CpuThrottle(1.0)
        self._sources = SourceReads(job)

    def run(self, memory: Memory) -> None:
        """Fill `memory`. Raises StageError for a source that cannot be read, or a bucket with other bytes."""
        self._throttle = CpuThrottle(1.0) if self._job.at_once else memory.throttle()
        for window in windows([arriving(self._plan, index, memory) for index in range(len(self._plan.ranges))]):
            self._pull(window, memory)
        memory.finish()

    def _pull(self, window: list[ArrivingBucket], memory: Memory) -> None:
        scratch, used = self._job.scratch.of(sum(bucket.scratch_bytes for bucket in window)), 0
        reads: list[list[Tagged]] = [[] for _ in self._job.manifest.owners]
        for bucket in window:
            for read in bucket.reads(scratch[used : used + bucket.scratch_bytes]):
                reads[read.owner].append((bucket.index, read))
            used += bucket.scratch_bytes
        left = {bucket.index: bucket.count for bucket in window}
        known = {bucket.index: bucket for bucket in window}
        for bucket in window:
            if not bucket.count:
                self._verify(bucket, memory)

        def arrived(index: int) -> None:
            left[index] -= 1
            if not left[index]:
                self._verify(known[index], memory)
            self._throttle.rest()

        self._sources.pull(reads, arrived)

    def _verify(self, bucket: ArrivingBucket, memory: Memory) -> None:
        """Hash what has arrived, and hand it on."""
        digest = blake3()
        for part in bucket.content():
            digest.update(part)
            self._throttle.rest()
        check_hash(self._job.manifest, bucket.index, str(digest.hexdigest()))
        bucket.hand_on(memory)


class DeltaStage:
    """Stages by a delta: copy the served base, apply the changed words, verify every dense bucket.

        live ── copy ──► shadow ── changed words ──► shadow ── hash the buckets ──► as the manifest says, or StageError

    Only the delta's small buckets are transferred. Raises StageError where no source of it can be read; dense bytes are
    used then.
    """

    def __init__(self, job: StageJob, delta: Delta) -> None:
        self._job = job
        self._delta = delta
        self._plan = job.plan
        what = f"the delta of version {job.manifest.version}"
        self._sources = [
            sources_in_reach(job.readers, part.sources, what)[0] if part.buckets else None for part in delta.parts
        ]

    def run(self, live: Memory, shadow: Memory) -> None:
        """Raises StageError for a source that cannot be read, or bytes that are not those of the manifest."""
        self._job.progress.total_bytes = self._delta.total_bytes
        throttle = shadow.throttle()
        shadow.copy_from(live, throttle.rest)
        for part, held, source in zip(self._delta.parts, self._plan.maps, self._sources, strict=True):
            for number, bucket in enumerate(part.buckets):
                assert source is not None
                self._job.check()
                code = self._job.scratch.of(bucket.length)
                read_code(self._job, source, number, bucket, code)
                change = decode(code, bucket.target_length)
                self._apply(held.in_arena(bucket.target_offset, bucket.target_length), bucket, change, shadow)
                throttle.rest()
        shadow.finish()
        for index, (pieces, (_, length)) in enumerate(zip(self._plan.pieces, self._plan.ranges, strict=True)):
            self._job.check()
            check_hash(self._job.manifest, index, bucket_hash(pieces, length, shadow))
            throttle.rest()

    def _apply(self, pieces: list[ShardPiece], bucket: DeltaBucket, change: DecodedDelta, shadow: Memory) -> None:
        for piece, places, values in words_of_pieces(self._job, pieces, bucket, change):
            whole = Piece(piece.tensor, piece.tensor_offset, 0, piece.span)
            words = np.frombuffer(shadow.read(whole), dtype=values.dtype)
            if not words.flags.writeable or shadow.in_place(whole) is None:
                words = words.copy()
            words[places] = values
            if shadow.in_place(whole) is None:
                shadow.write(whole, words.view(np.uint8).data)


def read_code(job: StageJob, source: tuple[Reader, Source], number: int, bucket: DeltaBucket, into: memoryview) -> None:
    """Read the code of an owner's delta bucket `number`. Raises StageError for one that cannot be read, or other bytes."""
    what = f"version {job.manifest.version}, delta bucket {number}"
    try:
        source[0].read(source[1], bucket.offset, into)
    except TransportError as error:
        raise StageError(f"{what} could not be read ({error})") from error
    found = hash_bytes(into)
    if found != bucket.hash:
        raise StageError(f"{what} has the hash {found[:16]}…, the manifest says {bucket.hash[:16]}…")
    job.progress.bytes_read += bucket.length


def words_of_pieces(
    job: StageJob, pieces: Iterable[ShardPiece], bucket: DeltaBucket, change: DecodedDelta
) -> Iterator[tuple[ShardPiece, Offsets, Words]]:
    """`change`, which is of words from the bucket's target, by the pieces that lie there: each with its words' places,
    in words from the piece's first one on, and their values. Pieces without a change are left out.

    Raises StageError for words that lie across tensors, or in none.
    """
    size, done = change.word_bytes, 0
    what = f"version {job.manifest.version}"
    for piece in pieces:
        begin = piece.arena - bucket.target_offset
        if any(number % size for number in (begin, piece.tensor_offset, piece.run, piece.stride)):
            raise StageError(f"{what}: delta words of {size} bytes lie across tensors")
        start, end = begin // size, (begin + piece.nbytes) // size
        first, last = np.searchsorted(change.indices, (start, end))
        done += int(last - first)
        if first == last:
            continue
        rows, columns = np.divmod(change.indices[first:last].astype(np.int64) - start, piece.run // size)
        yield piece, rows * (piece.stride // size) + columns, change.values[first:last]
    if done != len(change.indices):
        raise StageError(f"{what}: a delta bucket changes bytes that are no tensor's")
