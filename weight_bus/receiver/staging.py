"""Staging: pull a version's buckets into shadow memory, dense or as a delta, and verify their hashes.

    sources ── read_many ──► the shadow's own memory  (large pieces of contiguous tensors)
                        └──► scratch ──► the shadow   (small pieces and padding, and what is not contiguous)
    every byte of a bucket there? ──► hash ──► as the manifest says, or StageError

Where the transport can, the next bytes are in flight while a bucket is hashed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from blake3 import blake3

from weight_bus.errors import StageError, TransportError
from weight_bus.manifest.delta import DecodedDelta, decode
from weight_bus.manifest.layout import Piece, bucket_pieces, hash_bytes
from weight_bus.manifest.manifest import Delta, DeltaBucket, FileSource, Manifest, Source
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.memory.throttle import CpuThrottle
from weight_bus.receiver.buckets import BucketPlan, Memory, bucket_hash
from weight_bus.transports.base import Reader, read_at_once
from weight_bus.transports.file import FileReader

_log = structlog.get_logger()
_DIRECT_BYTES = 64 << 10
"""Smaller pieces are read together with their neighbours: the fixed cost of a read equals so many bytes."""
_PART_BYTES = 4 << 20
"""Larger pieces are read in parts: between two of them decoding has the whole memory bandwidth."""
_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Part:
    """One read: `length` bytes at `offset` of a bucket. `piece`: the tensor bytes that it is read into; None: scratch."""

    offset: int
    length: int
    piece: Piece | None


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
        self._candidates = [sources_in_reach(job.readers, owner.sources, what) for owner in job.manifest.owners]

    def run(self, memory: Memory) -> None:
        """Fill `memory`. Raises StageError for a source that cannot be read, or a bucket with other bytes."""
        self._throttle = CpuThrottle(1.0) if self._job.at_once else memory.throttle()
        for number, candidates in enumerate(self._candidates):
            buckets = [index for index, (owner, _, _) in enumerate(self._plan.ranges) if owner == number]
            for reader, source in candidates[:-1]:
                try:
                    self._pull(reader, source, buckets, memory)
                    break
                except _UnreadableError as error:
                    _log.warning("source cannot be read", version=self._job.manifest.version, why=error.what)
            else:
                reader, source = candidates[-1]
                self._pull(reader, source, buckets, memory)
        memory.finish()

    def _pull(self, reader: Reader, source: Source, buckets: list[int], memory: Memory) -> None:
        parts = {index: _parts(self._plan.pieces[index], self._plan.ranges[index][2], memory) for index in buckets}
        needs = {index: sum(part.length for part in parts[index] if part.piece is None) for index in buckets}
        for window in _windows(buckets, needs):
            scratch = self._job.scratch.of(sum(needs[index] for index in window))
            self._pull_window(reader, source, window, parts, scratch, memory)

    def _pull_window(
        self,
        reader: Reader,
        source: Source,
        window: list[int],
        parts: dict[int, list[Part]],
        scratch: memoryview,
        memory: Memory,
    ) -> None:
        reads: list[tuple[int, memoryview]] = []
        belongs: list[tuple[int, Part]] = []
        arrived: dict[int, list[int]] = {index: [] for index in window}
        used = 0
        for index in window:
            for part in parts[index]:
                into = None if part.piece is None else memory.in_place(part.piece)
                if into is None:
                    into, used = scratch[used : used + part.length], used + part.length
                arrived[index].append(len(reads))
                reads.append((self._plan.ranges[index][1] + part.offset, into))
                belongs.append((index, part))
        left = {index: len(parts[index]) for index in window}
        with closing(self._arrivals(reader, source, reads, window)) as arrivals:
            for number in arrivals:
                self._job.check()
                index, part = belongs[number]
                self._job.progress.bytes_read += part.length
                left[index] -= 1
                if not left[index]:
                    self._verify(index, [reads[each][1] for each in arrived[index]])
                    for each in arrived[index]:
                        self._hand_on(index, belongs[each][1], reads[each][1], memory)
                self._throttle.rest()

    def _arrivals(
        self, reader: Reader, source: Source, reads: list[tuple[int, memoryview]], window: list[int]
    ) -> Generator[int, None, None]:
        try:
            yield from (read_at_once(reader, source, reads) if self._job.at_once else reader.read_many(source, reads))
        except TransportError as error:
            which = f"bucket {window[0]}" if len(window) == 1 else f"buckets {window[0]} to {window[-1]}"
            raise _UnreadableError(
                f"version {self._job.manifest.version}, {which} could not be read ({error})"
            ) from error

    def _verify(self, index: int, data: list[memoryview]) -> None:
        digest = blake3()
        for part in data:
            digest.update(part)
            self._throttle.rest()
        check_hash(self._job.manifest, index, str(digest.hexdigest()))

    def _hand_on(self, index: int, part: Part, data: memoryview, memory: Memory) -> None:
        if part.piece is not None:
            return
        end = part.offset + part.length
        for piece in self._plan.pieces[index]:
            if part.offset <= piece.bucket_offset < end:
                start = piece.bucket_offset - part.offset
                memory.write(piece, data[start : start + piece.length])


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


def _parts(pieces: list[Piece], length: int, memory: Memory) -> list[Part]:
    """The reads of a bucket: large pieces in place, everything between them together."""
    parts: list[Part] = []
    done = 0
    for piece in pieces:
        if piece.length < _DIRECT_BYTES or memory.in_place(piece) is None:
            continue
        if piece.bucket_offset > done:
            parts.append(Part(done, piece.bucket_offset - done, None))
        for start in range(0, piece.length, _PART_BYTES):
            parts.append(_of_piece(piece, start, min(_PART_BYTES, piece.length - start)))
        done = piece.bucket_offset + piece.length
    if done < length:
        parts.append(Part(done, length - done, None))
    return parts


def _of_piece(piece: Piece, start: int, length: int) -> Part:
    own = Piece(piece.tensor, piece.tensor_offset + start, piece.bucket_offset + start, length)
    return Part(own.bucket_offset, length, own)


def _windows(buckets: list[int], needs: dict[int, int]) -> Iterator[list[int]]:
    """Buckets in order, as many at once as the scratch bound allows, at least one."""
    window: list[int] = []
    used = 0
    for index in buckets:
        if window and used + needs[index] > _SCRATCH_BYTES:
            yield window
            window, used = [], 0
        window.append(index)
        used += needs[index]
    if window:
        yield window


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
        candidates = sources_in_reach(job.readers, delta.sources, f"the delta of version {job.manifest.version}")
        self._reader, self._source = candidates[0]

    def run(self, live: Memory, shadow: Memory) -> None:
        """Raises StageError for a source that cannot be read, or bytes that are not those of the manifest."""
        self._job.progress.total_bytes = self._delta.total_bytes
        throttle = shadow.throttle()
        shadow.copy_from(live, throttle.rest)
        for number, bucket in enumerate(self._delta.buckets):
            self._job.check()
            self._apply(bucket, decode(self._read(number, bucket), bucket.target_length), shadow)
            self._job.progress.bytes_read += bucket.length
            throttle.rest()
        shadow.finish()
        for index, (pieces, (_, _, length)) in enumerate(zip(self._plan.pieces, self._plan.ranges, strict=True)):
            self._job.check()
            check_hash(self._job.manifest, index, bucket_hash(pieces, length, shadow))
            throttle.rest()

    def _read(self, number: int, bucket: DeltaBucket) -> memoryview:
        code = self._job.scratch.of(bucket.length)
        what = f"version {self._job.manifest.version}, delta bucket {number}"
        try:
            self._reader.read(self._source, bucket.offset, code)
        except TransportError as error:
            raise StageError(f"{what} could not be read ({error})") from error
        found = hash_bytes(code)
        if found != bucket.hash:
            raise StageError(f"{what} has the hash {found[:16]}…, the manifest says {bucket.hash[:16]}…")
        return code

    def _apply(self, bucket: DeltaBucket, change: DecodedDelta, shadow: Memory) -> None:
        """`change` is of words from the bucket's target; each lies in one tensor."""
        size = change.word_bytes
        done = 0
        for piece in bucket_pieces(self._job.manifest.layout, bucket.target_offset, bucket.target_length):
            if piece.bucket_offset % size or piece.tensor_offset % size or piece.length % size:
                raise StageError(
                    f"version {self._job.manifest.version}: delta words of {size} bytes lie across tensors"
                )
            start, end = piece.bucket_offset // size, (piece.bucket_offset + piece.length) // size
            first, last = np.searchsorted(change.indices, (start, end))
            done += int(last - first)
            if first == last:
                continue
            words = np.frombuffer(shadow.read(piece), dtype=change.values.dtype)
            if not words.flags.writeable or shadow.in_place(piece) is None:
                words = words.copy()
            words[change.indices[first:last] - start] = change.values[first:last]
            if shadow.in_place(piece) is None:
                shadow.write(piece, words.view(np.uint8).data)
        if done != len(change.indices):
            raise StageError(f"version {self._job.manifest.version}: a delta bucket changes bytes that are no tensor's")
