"""Staging: pull a version's buckets into shadow memory, dense or as a delta, and verify their hashes.

    sources ── read_many ──► the shadow's own memory, or scratch ──► the shadow      `weight_bus.receiver.arriving`
    every byte of a bucket there? ──► hash ──► as the manifest says, or StageError

Where the transport can, the next bytes are in flight while a bucket is hashed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from blake3 import blake3

from weight_bus.errors import StageError, TransportError
from weight_bus.manifest.delta import DecodedDelta, decode
from weight_bus.manifest.layout import Piece, hash_bytes
from weight_bus.manifest.manifest import Delta, DeltaBucket, FileSource, Manifest, Source
from weight_bus.manifest.shard_map import ShardPiece
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.memory.throttle import CpuThrottle
from weight_bus.receiver.arriving import ArrivingBucket, BucketRead, arriving, windows
from weight_bus.receiver.buckets import BucketPlan, Memory, bucket_hash
from weight_bus.transports.base import Reader, read_at_once
from weight_bus.transports.file import FileReader

_log = structlog.get_logger()


class Progress:
    """Progress of a stage. Written by its thread, read by any."""

    def __init__(self, version: int, total_bytes: int) -> None:
        self.version = version
        self.total_bytes = total_bytes
        self.bytes_read = 0
        self._started = time.monotonic()

    def begin_anew(self, total_bytes: int) -> None:
        self.total_bytes, self.bytes_read = total_bytes, 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


class Scratch:
    """Reusable host buffer: transports register it once."""

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def of(self, nbytes: int) -> memoryview:
        if self._arena is None or self._arena.nbytes < nbytes:
            self.close()
            self._arena = private_arena(nbytes)
        return self._arena.view[:nbytes]

    def close(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


@dataclass(frozen=True)
class StageJob:
    """Inputs of a stage. `check` raises once a newer version supersedes it; called as bytes arrive.

    `at_once`: on a thread that must not wait; what would have to, raises NotAtOnceError.
    """

    manifest: Manifest
    plan: BucketPlan
    readers: Sequence[Reader]
    scratch: Scratch
    progress: Progress
    check: Callable[[], None]
    at_once: bool = False


class DenseStage:
    """Pulls a manifest's dense bytes. Raises StageError, before it writes, where an owner has no readable source."""

    def __init__(self, job: StageJob) -> None:
        self._job = job
        self._plan = job.plan
        self._throttle = CpuThrottle(1.0)
        what = f"version {job.manifest.version}"
        self._candidates = [
            sources_in_reach(job.readers, owner.sources, what) if owner.total_bytes else []
            for owner in job.manifest.owners
        ]

    def run(self, memory: Memory) -> None:
        """Fill `memory`. Raises StageError for a source that cannot be read, or a bucket with other bytes."""
        self._throttle = CpuThrottle(1.0) if self._job.at_once else memory.throttle()
        for window in windows([arriving(self._plan, index, memory) for index in range(len(self._plan.ranges))]):
            self._pull(window, memory)
        memory.finish()

    def _pull(self, window: list[ArrivingBucket], memory: Memory) -> None:
        scratch, used = self._job.scratch.of(sum(bucket.scratch_bytes for bucket in window)), 0
        reads: list[list[tuple[ArrivingBucket, BucketRead]]] = [[] for _ in self._candidates]
        for bucket in window:
            for read in bucket.reads(scratch[used : used + bucket.scratch_bytes]):
                reads[read.owner].append((bucket, read))
            used += bucket.scratch_bytes
        left = {bucket.index: bucket.count for bucket in window}
        for bucket in window:
            if not bucket.count:
                self._verify(bucket, memory)
        for owner, wanted in enumerate(reads):
            while wanted:
                try:
                    self._read(owner, wanted, left, memory)
                except _UnreadableError as error:
                    if len(self._candidates[owner]) == 1:
                        raise
                    _log.warning("source cannot be read", version=self._job.manifest.version, why=error.what)
                    self._candidates[owner].pop(0)

    def _read(
        self, owner: int, wanted: list[tuple[ArrivingBucket, BucketRead]], left: dict[int, int], memory: Memory
    ) -> None:
        """Make the reads; those that are done are taken off `wanted`."""
        reader, source = self._candidates[owner][0]
        asked, done = list(wanted), set[int]()
        try:
            self._arrive(reader, source, asked, done, left, memory)
        finally:
            wanted[:] = [each for number, each in enumerate(asked) if number not in done]

    def _arrive(
        self,
        reader: Reader,
        source: Source,
        asked: list[tuple[ArrivingBucket, BucketRead]],
        done: set[int],
        left: dict[int, int],
        memory: Memory,
    ) -> None:
        with closing(self._arrivals(reader, source, asked)) as arrivals:
            for number in arrivals:
                self._job.check()
                bucket, read = asked[number]
                done.add(number)
                read.arrived()
                self._job.progress.bytes_read += len(read.into)
                left[bucket.index] -= 1
                if not left[bucket.index]:
                    self._verify(bucket, memory)
                self._throttle.rest()

    def _arrivals(
        self, reader: Reader, source: Source, asked: list[tuple[ArrivingBucket, BucketRead]]
    ) -> Generator[int, None, None]:
        reads = [(read.offset, read.into) for _, read in asked]
        try:
            yield from (read_at_once(reader, source, reads) if self._job.at_once else reader.read_many(source, reads))
        except TransportError as error:
            first, last = asked[0][0].index, asked[-1][0].index
            which = f"bucket {first}" if first == last else f"buckets {first} to {last}"
            raise _UnreadableError(
                f"version {self._job.manifest.version}, {which} could not be read ({error})"
            ) from error

    def _verify(self, bucket: ArrivingBucket, memory: Memory) -> None:
        """Hash what has arrived, and hand it on."""
        digest = blake3()
        for part in bucket.content():
            digest.update(part)
            self._throttle.rest()
        check_hash(self._job.manifest, bucket.index, str(digest.hexdigest()))
        bucket.hand_on(memory)


class _UnreadableError(StageError):
    """A source could not be read: another one may be readable."""


def sources_in_reach(readers: Sequence[Reader], sources: Sequence[Source], what: str) -> list[tuple[Reader, Source]]:
    """Readers with the sources they can read, in order of preference. Raises StageError where there is none."""
    found = [(reader, source) for reader in readers for source in sources if reader.can_read(source)]
    if not found:
        offered = ", ".join(type(source).__name__ for source in sources) or "none"
        known = ", ".join(reader.name for reader in readers)
        raise StageError(
            f"{what}: no source can be read (offered: {offered}; readers: {known})", _remedy(readers, sources)
        )
    return found


def _remedy(readers: Sequence[Reader], sources: Sequence[Source]) -> str:
    """What is missing, where files are offered: a transport does not help an engine that may read none."""
    files = [source.path for source in sources if isinstance(source, FileSource)]
    if not files:
        return "use the same weights.transport on both sides"
    roots = [reader.root for reader in readers if isinstance(reader, FileReader)]
    if not roots:
        return f"set this engine's weights.file_root (vllm serve: ROLLMESH_FILE_ROOT) to a folder that holds {files[0]}"
    if not Path(files[0]).resolve().is_relative_to(roots[0]):
        return f"{files[0]} lies outside this engine's weights.file_root, {roots[0]}: put it there, or set another"
    return f"{files[0]} is no file on this engine's machine: it must be seen under the same name as by the bus"


def check_hash(manifest: Manifest, index: int, found: str) -> None:
    """Raise StageError unless bucket `index` has the hash that the manifest says."""
    expected = manifest.buckets[index].hash
    if found != expected:
        raise StageError(
            f"version {manifest.version}, bucket {index} has the hash {found[:16]}…, the manifest says {expected[:16]}…"
        )


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
                change = decode(self._read(source, number, bucket), bucket.target_length)
                self._apply(held.in_arena(bucket.target_offset, bucket.target_length), bucket, change, shadow)
                self._job.progress.bytes_read += bucket.length
                throttle.rest()
        shadow.finish()
        for index, (pieces, (_, length)) in enumerate(zip(self._plan.pieces, self._plan.ranges, strict=True)):
            self._job.check()
            check_hash(self._job.manifest, index, bucket_hash(pieces, length, shadow))
            throttle.rest()

    def _read(self, source: tuple[Reader, Source], number: int, bucket: DeltaBucket) -> memoryview:
        code = self._job.scratch.of(bucket.length)
        what = f"version {self._job.manifest.version}, delta bucket {number}"
        try:
            source[0].read(source[1], bucket.offset, code)
        except TransportError as error:
            raise StageError(f"{what} could not be read ({error})") from error
        found = hash_bytes(code)
        if found != bucket.hash:
            raise StageError(f"{what} has the hash {found[:16]}…, the manifest says {bucket.hash[:16]}…")
        return code

    def _apply(self, pieces: list[ShardPiece], bucket: DeltaBucket, change: DecodedDelta, shadow: Memory) -> None:
        """`change` is of words from the bucket's target; each lies in one run of a piece."""
        size = change.word_bytes
        done = 0
        for piece in pieces:
            begin = piece.arena - bucket.target_offset
            if any(number % size for number in (begin, piece.tensor_offset, piece.run, piece.stride)):
                raise StageError(
                    f"version {self._job.manifest.version}: delta words of {size} bytes lie across tensors"
                )
            start, end = begin // size, (begin + piece.nbytes) // size
            first, last = np.searchsorted(change.indices, (start, end))
            done += int(last - first)
            if first == last:
                continue
            whole = Piece(piece.tensor, piece.tensor_offset, 0, piece.span)
            words = np.frombuffer(shadow.read(whole), dtype=change.values.dtype)
            if not words.flags.writeable or shadow.in_place(whole) is None:
                words = words.copy()
            rows, columns = np.divmod(change.indices[first:last] - start, piece.run // size)
            words[rows * (piece.stride // size) + columns] = change.values[first:last]
            if shadow.in_place(whole) is None:
                shadow.write(whole, words.view(np.uint8).data)
        if done != len(change.indices):
            raise StageError(f"version {self._job.manifest.version}: a delta bucket changes bytes that are no tensor's")
