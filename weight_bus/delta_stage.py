"""Filling shadow memory by a delta: the base that is served, and what changed since.

    live ── copy ──► shadow ── changed words ──► shadow ── hash every dense bucket ──► as the manifest says, or StageError

A delta is an offer: whoever cannot use it takes the dense bytes. Only its own small buckets travel; the copy and the
hashes run at memory speed.
"""

from __future__ import annotations

import numpy as np

from weight_bus.delta import DecodedDelta, decode
from weight_bus.errors import StageError, TransportError
from weight_bus.fitting import pace_beside
from weight_bus.layout import bucket_pieces, hash_bytes
from weight_bus.manifest import Delta, DeltaBucket
from weight_bus.scatter import Memory, bucket_hash
from weight_bus.staging import StageJob, check_hash, sources_in_reach


class DeltaStage:
    """Takes the delta that a manifest offers, where its base is served. Raises StageError for one out of reach."""

    def __init__(self, job: StageJob, delta: Delta) -> None:
        self._job = job
        self._delta = delta
        self._plan = job.plan
        candidates = sources_in_reach(job.readers, delta.sources, f"the delta of version {job.manifest.version}")
        self._reader, self._source = candidates[0]

    def run(self, live: Memory, shadow: Memory) -> None:
        """Raises StageError for a source that cannot be read, or bytes that are not those of the manifest."""
        self._job.progress.total_bytes = self._delta.total_bytes
        pace = pace_beside(shadow)
        shadow.copy_from(live, pace.rest)
        for number, bucket in enumerate(self._delta.buckets):
            self._job.check()
            self._apply(bucket, decode(self._read(number, bucket), bucket.target_length), shadow)
            self._job.progress.bytes_read += bucket.length
            pace.rest()
        shadow.finish()
        for index, (pieces, (_, _, length)) in enumerate(zip(self._plan.pieces, self._plan.ranges, strict=True)):
            self._job.check()
            check_hash(self._job.manifest, index, bucket_hash(pieces, length, shadow))
            pace.rest()

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
            held = shadow.read(piece)
            words = np.frombuffer(held, dtype=change.values.dtype)
            if not words.flags.writeable or shadow.in_place(piece) is None:
                words = words.copy()
            words[change.indices[first:last] - start] = change.values[first:last]
            if shadow.in_place(piece) is None:
                shadow.write(piece, words.view(np.uint8).data)
        if done != len(change.indices):
            raise StageError(f"version {self._job.manifest.version}: a delta bucket changes bytes that are no tensor's")
