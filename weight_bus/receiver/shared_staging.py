"""Staging by the ranks of one engine together: each reads a part of the bytes, and keeps its slices of all of them.

    dense    rank 0 ── read ──►┐                      ┌─► own buckets hashed      rank 0
                               ├ shared memory ─ meet ┤   own slices kept
             rank 1 ── read ──►┘                      └─► own buckets hashed …    rank 1

    delta    codes are read and hashed likewise, each rank applies what lies in its slices. Then all put their slices of
             the result into shared memory, where the buckets are hashed, and take them from there

So a bucket is hashed whole, by one rank, from the very bytes that all ranks keep. What was kept before a hash was found
wrong is never served: at the last meeting every rank has found its buckets right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

import structlog
from blake3 import blake3

from services.wire.errors import RollmeshError
from weight_bus.errors import StageError
from weight_bus.manifest.delta import decode
from weight_bus.manifest.layout import Piece, bucket_pieces
from weight_bus.manifest.manifest import Delta, DeltaBucket
from weight_bus.manifest.shard_map import ShardMap, ShardPiece, merged
from weight_bus.memory.throttle import CpuThrottle
from weight_bus.receiver.arriving import BucketRead, Place
from weight_bus.receiver.buckets import Memory
from weight_bus.receiver.job import StageJob, check_hash
from weight_bus.receiver.rank_sharing import Meeting, RankSharing, Way
from weight_bus.receiver.sources import SourceReads, Tagged, sources_in_reach
from weight_bus.receiver.staging import DenseStage, read_code, words_of_pieces

_READ_BYTES = 4 << 20
"""Most bytes of one read: between two of them decoding has the whole memory bandwidth."""
_LEAST_READ_BYTES = 4 << 10
_READS = 16
"""Least number of reads a rank in a round that is full: so even are their shares of a small version."""
_ZEROS = bytes(4096)
_log = structlog.get_logger()


class SharedStage:
    """One rank's part of a stage. Raises StageError, before it writes, where an owner has no readable source."""

    def __init__(self, job: StageJob, sharing: RankSharing, meeting: Meeting) -> None:
        self._job, self._sharing, self._meeting = job, sharing, meeting
        self._sources = SourceReads(job)
        self._begin()

    def _begin(self) -> None:
        """All ranks reckon alike, from the beginning of an attempt."""
        self._loads = [0] * self._sharing.ranks
        """Bytes that each rank reads."""
        self._round = 0

    def run(self, base: Memory | None, shadow: Memory) -> None:
        """Fill `shadow`. `base`: what is served, where it is the delta's base; a delta is taken when all ranks can.

        Raises StageError for a source that cannot be read, bytes that are not the manifest's, or a rank that gave up.
        """
        delta = self._job.manifest.delta if base is not None else None
        ways = self._meeting.join(Way.DENSE if delta is None else Way.DELTA)
        if Way.KNOWN in ways:
            # After a failure of others alone: those that have the version do not read it again.
            DenseStage(self._job).run(shadow)
            return
        if delta is not None and base is not None and set(ways) == {Way.DELTA}:
            try:
                self._by_delta(delta, base, shadow)
            except RollmeshError as error:
                self._job.check()
                _log.warning("delta not taken, dense bytes instead", version=self._job.manifest.version, why=str(error))
                self._begin()
                self._meeting.again()
                self._meeting.join(Way.DENSE)
                self._job.progress.begin_anew(self._job.manifest.total_bytes)
                shadow.begin()
            else:
                return
        self._dense(shadow)

    def _dense(self, shadow: Memory) -> None:
        throttle = shadow.throttle()

        def read(start: int, stop: int, part: memoryview) -> None:
            self._sources.pull(self._own_reads(start, stop, part), lambda _: throttle.rest())

        self._exchange(read, shadow, throttle)

    def _by_delta(self, delta: Delta, base: Memory, shadow: Memory) -> None:
        self._job.progress.total_bytes = delta.total_bytes
        throttle = shadow.throttle()
        shadow.copy_from(base, throttle.rest)
        self._apply_codes(delta, shadow)
        shadow.finish()

        def give(start: int, stop: int, part: memoryview) -> None:
            for piece in self._pieces(start, stop):
                if self._gives(piece, shadow):
                    shadow.read_into(piece, part[piece.bucket_offset : piece.bucket_offset + piece.length])

        self._exchange(give, shadow, throttle)

    def _exchange(self, fill: Callable[[int, int, memoryview], None], shadow: Memory, throttle: CpuThrottle) -> None:
        """All of the layout's bytes, round by round: `fill` writes this rank's share of a round into the shared part; what
        all have written is hashed and kept."""
        hashes = _OwnHashes(self._job, self._sharing)
        for start, stop in self._windows():
            part = self._next_part()
            fill(start, stop, part)
            self._meeting.meet()
            hashes.take(start, stop, part, throttle.rest)
            self._keep(start, stop, part, shadow)
            throttle.rest()
        self._meeting.meet()
        shadow.finish()

    def _gives(self, piece: Piece, shadow: Memory) -> bool:
        """Whether this rank puts its bytes of a piece into shared memory: of what all have whole, one does."""
        return shadow.held_by_slice(piece.tensor) or piece.tensor % self._sharing.ranks == self._sharing.rank

    def _keep(self, start: int, stop: int, part: memoryview, shadow: Memory) -> None:
        self._job.check()
        for piece in self._pieces(start, stop):
            shadow.write(piece, part[piece.bucket_offset : piece.bucket_offset + piece.length])

    def _apply_codes(self, delta: Delta, shadow: Memory) -> None:
        what = f"the delta of version {self._job.manifest.version}"
        sources = [
            sources_in_reach(self._job.readers, part.sources, what)[0] if part.buckets else None for part in delta.parts
        ]
        for window in self._code_windows(delta):
            part, used = self._next_part(), 0
            codes: list[tuple[int, DeltaBucket, memoryview]] = []
            for owner, number, bucket in window:
                code = part[used : used + bucket.length]
                codes.append((owner, bucket, code))
                used += bucket.length
                source = sources[owner]
                if self._is_own(bucket.length) and source is not None:
                    read_code(self._job, source, number, bucket, code)
            self._meeting.meet()
            for owner, bucket, code in codes:
                self._job.check()
                self._apply(self._job.plan.maps[owner], bucket, code, shadow)

    def _apply(self, held: ShardMap, bucket: DeltaBucket, code: memoryview, shadow: Memory) -> None:
        change = decode(code, bucket.target_length)
        pieces = held.in_arena(bucket.target_offset, bucket.target_length)
        for piece, places, values in words_of_pieces(self._job, pieces, bucket, change):
            shadow.put_words(piece.tensor, piece.tensor_offset + places * change.word_bytes, values)

    def _own_reads(self, start: int, stop: int, part: memoryview) -> list[list[Tagged]]:
        """This rank's share of the reads of the layout's bytes `start` to `stop`, into `part`; a list for each owner."""
        plan = self._job.plan
        fair = (stop - start) // (_READS * self._sharing.ranks)
        most = max(_LEAST_READ_BYTES, min(_READ_BYTES, fair))
        own: list[list[tuple[int, int, list[ShardPiece]]]] = []
        for held in plan.maps:
            small = [each for piece in held.within(start, stop - start) for each in _cut(piece, most)]
            own.append([found for found in merged(small, most) if self._is_own(found[1] - found[0])])
        spread = [(owner, found) for owner, found in enumerate(own) if plan.shards[owner] is not None]
        scratch = self._job.scratch.of(sum(last - first for _, found in spread for first, last, _ in found) or 1)
        places = {
            piece.tensor: Place(piece, part[piece.bucket_offset : piece.bucket_offset + piece.length], kept=True)
            for piece in self._pieces(start, stop)
        }
        reads: list[list[Tagged]] = [[] for _ in own]
        used = 0
        for owner, ranges in enumerate(own):
            for first, last, pieces in ranges:
                if plan.shards[owner] is None:
                    reads[owner].append((0, BucketRead(owner, first, part[first - start : last - start])))
                    continue
                into, used = scratch[used : used + last - first], used + last - first
                at = [(piece, places[piece.tensor]) for piece in pieces]
                reads[owner].append((0, BucketRead(owner, first, into, at)))
        return reads

    def _is_own(self, nbytes: int) -> bool:
        """Whether the next `nbytes` are for this rank to read: for the one that has the fewest so far."""
        chosen = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[chosen] += nbytes
        return chosen == self._sharing.rank

    def _code_windows(self, delta: Delta) -> Iterator[list[tuple[int, int, DeltaBucket]]]:
        """Buckets of all owners' codes, with their owners and numbers, as many at once as shared memory takes."""
        window: list[tuple[int, int, DeltaBucket]] = []
        used = 0
        for owner, part in enumerate(delta.parts):
            for number, bucket in enumerate(part.buckets):
                if bucket.length > self._sharing.part_bytes:
                    raise StageError(f"a delta bucket of {bucket.length} bytes is too long for ranks that share memory")
                if used + bucket.length > self._sharing.part_bytes:
                    yield window
                    window, used = [], 0
                window.append((owner, number, bucket))
                used += bucket.length
        if window:
            yield window

    def _windows(self) -> Iterator[tuple[int, int]]:
        total, step = self._job.plan.layout.total_bytes, self._sharing.part_bytes
        return ((start, min(start + step, total)) for start in range(0, total, step))

    def _pieces(self, start: int, stop: int) -> list[Piece]:
        return bucket_pieces(self._job.plan.layout, start, stop - start)

    def _next_part(self) -> memoryview:
        self._round += 1
        return self._sharing.part(self._round)


class _OwnHashes:
    """Of the buckets that this rank hashes, piece by piece as they come by: those of every so many."""

    def __init__(self, job: StageJob, sharing: RankSharing) -> None:
        self._job, self._sharing = job, sharing
        self._begun: dict[int, blake3] = {}

    def take(self, start: int, stop: int, part: memoryview, rest: Callable[[], None]) -> None:
        """`part` holds the layout's bytes `start` to `stop`. Raises StageError for a bucket that ends there with another
        hash than the manifest's.
        """
        plan = self._job.plan
        first = max(0, bisect_right(plan.ranges, start, key=lambda each: each[0]) - 1)
        for index in range(first, len(plan.ranges)):
            offset, length = plan.ranges[index]
            if offset >= stop:
                break
            if index % self._sharing.ranks != self._sharing.rank:
                continue
            low, high = max(offset, start), min(offset + length, stop)
            digest = self._begun.setdefault(index, blake3())
            for data in _padded(part[low - start : high - start], bucket_pieces(plan.layout, low, high - low)):
                digest.update(data)
                rest()
            if high == offset + length:
                check_hash(self._job.manifest, index, str(self._begun.pop(index).hexdigest()))


def _padded(data: memoryview, pieces: list[Piece]) -> Iterator[memoryview]:
    """The pieces of tensors in `data`, and zeros where there is padding."""
    position = 0
    for piece in pieces:
        yield from _zeros(piece.bucket_offset - position)
        position = piece.bucket_offset + piece.length
        for begin in range(piece.bucket_offset, position, _READ_BYTES):
            yield data[begin : min(begin + _READ_BYTES, position)]
    yield from _zeros(len(data) - position)


def _zeros(length: int) -> Iterator[memoryview]:
    for start in range(0, length, len(_ZEROS)):
        yield memoryview(_ZEROS)[: length - start]


def _cut(piece: ShardPiece, most: int) -> Iterator[ShardPiece]:
    """Parts of at most `most` bytes."""
    for part in piece.split(most):
        if part.count > 1:
            yield part
            continue
        for start in range(0, part.run, most):
            length = min(most, part.run - start)
            yield ShardPiece(part.tensor, part.tensor_offset + start, part.arena + start, length, length, 1)
