"""The publisher: the trainer's side of the weight bus. It casts weights into an arena buffer and makes the manifest.

    training thread   publish(v)   wait for a free buffer ─► cast-copy ─► Publication                  returns
    background        hash the buckets ─► exchange with the other ranks ─► delta to v−1 ─► sign ─► manifest of v

    buffers   |v−1, staged by receivers|   |v, just published|      the next version overwrites the older one

A buffer is not overwritten while its version is leased (announced and not settled) or still being hashed: `publish` waits
for it, up to a deadline. A receiver that is two versions behind reads other bytes, sees it by the hash and takes the
newer version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec
import structlog

from services.wire.errors import ConflictError, DeadlineError, NotReadyError, RollmeshError, UsageError
from weight_bus.errors import TransportError
from weight_bus.manifest.computed import PublishedTensor
from weight_bus.manifest.delta import WORD_DTYPES, changed_share, encode
from weight_bus.manifest.layout import ITEM_BYTES, hash_bytes, plan_buckets, root_digest
from weight_bus.manifest.manifest import Bucket, Delta, DeltaBucket, Layout, Manifest, Owner, check_manifest, sign
from weight_bus.manifest.tensors import dtype_of
from weight_bus.memory.arena import Arena
from weight_bus.publisher.arena_buffer import ArenaBuffer
from weight_bus.publisher.buffer_leases import BUFFERS, BufferLeases
from weight_bus.publisher.sharding import Ranks, plan_owner
from weight_bus.transports.base import Exporter

_PARALLEL_HASH_BYTES = 1 << 20
_HASH_THREADS = 2
_DELTA_TRANSPORTS = ("nixl", "shm")
"""Transports whose receivers read ranges. A broadcast sends everything, and a file is for engines without a base."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """One publishing rank's part of a version, for the other ranks: what it owns, or why it failed."""

    version: int
    layout_digest: str
    owner: Owner
    buckets: list[Bucket]
    error: str = ""


class Publisher:
    """One trainer's publisher, or one rank's of it. `publish` is called from one thread.

    `tensors` are the named weights (Hugging Face names, any shape, device or floating dtype; a tied weight under one
    name only), or how one is computed. Their names, order and shapes are fixed for the publisher's life. `dtype` is the
    serving dtype by name, `key` the run's weight key. A delta is offered where it is no larger than `delta_max_ratio` of
    the dense bytes (0: never), over nixl and shm, by one rank alone. With `ranks`, tensors may be DTensors (FSDP2) and
    every rank publishes its own part. Raises UsageError for what cannot be served, TransportError when no arena can be
    had.
    """

    def __init__(
        self,
        run_id: str,
        tensors: Mapping[str, PublishedTensor],
        dtype: str,
        exporter: Exporter,
        bucket_bytes: int,
        *,
        key: str | None = None,
        wait_s: float = 60.0,
        delta_max_ratio: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        self._run_id, self._exporter, self._key, self._wait_s, self._ranks = run_id, exporter, key, wait_s, ranks
        self._plan = plan_owner(tensors, dtype, None if ranks is None else ranks.rank)
        self._ranges = plan_buckets(self._plan.total_bytes, bucket_bytes)
        # Both before the first export: a source may describe all registered memory.
        self._arenas = [ArenaBuffer(exporter, self._plan, dtype_of(dtype)) for _ in range(BUFFERS)]
        offers = ranks is None and exporter.name in _DELTA_TRANSPORTS and delta_max_ratio > 0
        self._deltas = DeltaMaker(exporter, self.layout, delta_max_ratio) if offers else None
        self._leases = BufferLeases()
        self._newest: int | None = None
        """The version copied last, and its buffer; used by the training thread."""
        self._newest_buffer = 1
        self.latest: Manifest | None = None
        """The manifest that was made last."""
        """The manifest made last, and its buffer; used by the background thread."""
        self._latest_buffer = 1
        self._background = ThreadPoolExecutor(1, "weight-publisher")

    @property
    def layout(self) -> Layout:
        return self._plan.layout

    def publish(self, version: int, tensors: Mapping[str, PublishedTensor], *, leased: bool = False) -> Publication:
        """Put `version` in place; its manifest is made in the background and had from the Publication.

        Blocks for one cast-copy of all bytes, and until the buffer it goes into is free. `leased`: the buffer is kept until
        `release(version)`, or until making the manifest fails. The same version with the same bytes answers its first
        manifest again; with other bytes the Publication fails with ConflictError, and nothing was touched that a
        receiver may read. Raises ConflictError for an older version, DeadlineError when no buffer comes free in time,
        UsageError when names or shapes are not those the publisher was made for.
        """
        newest = self._newest
        if newest is not None and version < newest:
            raise ConflictError(f"version {version} is older than {newest}, which is published")
        self._check(tensors)
        again = version == newest
        buffer = 1 - self._newest_buffer
        self._leases.begin(buffer, version, leased=leased and not again, wait_s=self._wait_s)
        try:
            self._arenas[buffer].fill(tensors)
        except BaseException:
            self._leases.abandon(buffer, version)
            raise
        self._leases.copied(buffer, version)
        if not again:
            self._newest, self._newest_buffer = version, buffer
        return Publication(version, self._background.submit(self._make, version, buffer, again))

    def digest(self, version: int, tensors: Mapping[str, PublishedTensor]) -> str:
        """The root digest that these weights would be published under as `version`; nobody can read them yet.

        Takes the time of a publication. Raises as `publish` does, but for versions that are not newer.
        """
        self._check(tensors)
        buffer = 1 - self._newest_buffer
        self._leases.begin(buffer, version, leased=False, wait_s=self._wait_s)
        try:
            self._arenas[buffer].fill(tensors)
            return self._background.submit(self._draft, version, buffer).result().root_digest
        finally:
            self._leases.abandon(buffer, version)

    def release(self, version: int) -> None:
        """The version has settled: its buffer may be overwritten. Does nothing for a version without a lease."""
        self._leases.let_go("announced and not settled", version)

    def close(self) -> None:
        """Withdraw the arenas. Engines keep what they serve; nothing more can be staged."""
        self._background.shutdown(wait=True, cancel_futures=True)
        self._arenas.clear()
        self._exporter.close()

    def _check(self, tensors: Mapping[str, PublishedTensor]) -> None:
        if not self._arenas:
            raise UsageError("the publisher is closed", "make a new one")
        if len(tensors) != len(self.layout.tensors):
            raise UsageError(f"{len(tensors)} tensors to publish, {len(self.layout.tensors)} planned", "give them all")
        for entry in self.layout.tensors:
            tensor = tensors.get(entry.name)
            if tensor is None or tensor.shape != entry.shape:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise UsageError(f"tensor {entry.name} is {found}, planned was {entry.shape}", "make a new publisher")

    def _make(self, version: int, buffer: int, again: bool) -> Manifest:
        try:
            draft = self._draft(version, buffer)
            if again:
                return self._same_again(draft)
            manifest = self._offered(draft, buffer)
        except BaseException:
            if again:
                self._leases.abandon(buffer, version)
            else:
                self.release(version)
            raise
        finally:
            self._leases.let_go("being hashed", version, buffer)
        self.latest, self._latest_buffer = manifest, buffer
        return manifest

    def _same_again(self, draft: Manifest) -> Manifest:
        latest = self.latest
        if latest is None or latest.version != draft.version:
            raise ConflictError(f"version {draft.version} could not be published at first", "publish a newer version")
        if latest.root_digest != draft.root_digest:
            raise ConflictError(
                f"version {draft.version} is published with other bytes", "take one optimizer step first"
            )
        return latest

    def _draft(self, version: int, buffer: int) -> Manifest:
        """The version's manifest without signature and delta; a publisher alone leaves its sources out, too."""
        if self._ranks is None:
            owners, buckets = [Owner(total_bytes=self._plan.total_bytes, sources=[])], self._hash(buffer, 0)
        else:
            owners, buckets = self._with_ranks(self._ranks, version, buffer)
        draft = Manifest(
            run_id=self._run_id,
            version=version,
            layout=self.layout,
            owners=owners,
            buckets=buckets,
            root_digest=root_digest(bucket.hash for bucket in buckets),
        )
        check_manifest(draft)
        return draft

    def _with_ranks(self, ranks: Ranks, version: int, buffer: int) -> tuple[list[Owner], list[Bucket]]:
        parts = [
            msgspec.msgpack.decode(part, type=RankPart)
            for part in ranks.exchange(self._part(version, buffer, ranks.rank))
        ]
        for number, part in enumerate(parts):
            if part.error:
                raise TransportError(f"rank {number} could not publish version {version} ({part.error})")
            if (part.version, part.layout_digest) != (version, self.layout.digest):
                raise ConflictError(
                    f"rank {number} publishes version {part.version} of layout {part.layout_digest[:16]}…, "
                    f"rank {ranks.rank} version {version} of {self.layout.digest[:16]}…"
                )
        return [part.owner for part in parts], [bucket for part in parts for bucket in part.buckets]

    def _part(self, version: int, buffer: int, rank: int) -> bytes:
        arena, error, buckets = self._arenas[buffer].arena, "", []
        owner = Owner(total_bytes=self._plan.total_bytes, sources=[], shards=self._plan.shards)
        try:
            buckets = self._hash(buffer, rank)
            sources = [] if arena is None else [self._exporter.export(arena)]
            owner = msgspec.structs.replace(owner, sources=sources)
        except RollmeshError as failed:
            # The other ranks must be told, or they wait for this one until the deadline.
            error = str(failed)
        return msgspec.msgpack.encode(
            RankPart(version=version, layout_digest=self.layout.digest, owner=owner, buckets=buckets, error=error)
        )

    def _hash(self, buffer: int, owner: int) -> list[Bucket]:
        view = self._arenas[buffer].view
        return [
            Bucket(owner=owner, offset=offset, length=length, hash=_hash(view[offset : offset + length]))
            for offset, length in self._ranges
        ]

    def _offered(self, draft: Manifest, buffer: int) -> Manifest:
        """The draft with its sources, its delta and its signature."""
        arena = self._arenas[buffer].arena
        if self._ranks is None and arena is not None:
            source = self._exporter.export(arena, draft)
            draft = msgspec.structs.replace(draft, owners=[Owner(total_bytes=arena.nbytes, sources=[source])])
        delta = self._delta(buffer)
        if delta is not None:
            draft = msgspec.structs.replace(draft, kind="delta", base_version=delta.base_version, delta=delta)
        return sign(draft, self._key)

    def _delta(self, buffer: int) -> Delta | None:
        base, other = self.latest, 1 - buffer
        if self._deltas is None or base is None or self._latest_buffer != other:
            return None
        if not self._leases.lease_base(other, base.version):
            return None
        try:
            old, new = self._arenas[other].view, self._arenas[buffer].view
            return self._deltas.make(buffer, base, old, new, lambda: self._leases.wanted(other))
        finally:
            self._leases.let_go("the base of a delta", base.version, other)


def _hash(data: memoryview) -> str:
    return hash_bytes(data, threads=1 if len(data) < _PARALLEL_HASH_BYTES else _HASH_THREADS)


MANIFEST_DEADLINE_S = 60.0


class Publication:
    """A published version whose bytes are copied and whose manifest is being made.

    `future`: the manifest, or the error (ConflictError for a reused version).
    """

    def __init__(self, version: int, future: Future[Manifest]) -> None:
        self.version = version
        self.future = future

    def wait(self, timeout_s: float) -> None:
        """Wait until the manifest is made, or could not be, but no longer than that."""
        wait([self.future], timeout_s)

    def manifest(self, timeout_s: float = MANIFEST_DEADLINE_S) -> Manifest:
        """Wait for the manifest. Raises what making it raised, DeadlineError, or NotReadyError from a closed publisher."""
        try:
            return self.future.result(timeout=timeout_s)
        except CancelledError as error:
            raise NotReadyError(f"the publisher was closed before version {self.version} had a manifest") from error
        except FutureTimeout as error:
            if self.future.done():
                raise
            raise DeadlineError(f"the manifest of version {self.version} took longer than {timeout_s:g} s") from error


TARGET_BYTES = 4 << 20
"""Bytes of the layout for one delta bucket: as fast as any size that was measured, and soon given up."""
_SAMPLES, _SAMPLE_BYTES = 8, 64 << 10
_SAMPLE_SLACK = 1.5
"""A code takes 0.85 to 1.3 of the share of changed words (measured): a sample above 1.5 of the bound cannot pay."""

_log = structlog.get_logger()


class DeltaMaker:
    """Encodes the delta of a version against the one before; at most `max_ratio` of the layout's bytes.

        sample ── too much changed ──► none
        each 4 MiB of both buffers ──► code ──► this buffer's delta arena      too large, or the trainer waits ──► none

    Its two arenas are allocated for the first delta.
    """

    def __init__(self, exporter: Exporter, layout: Layout, max_ratio: float) -> None:
        self._exporter = exporter
        self._total = layout.total_bytes
        self._most = int(max_ratio * layout.total_bytes)
        smallest = min(ITEM_BYTES[entry.dtype] for entry in layout.tensors)
        self._word_bytes = min(smallest, max(WORD_DTYPES))
        self._arenas: list[Arena] = []

    def make(
        self, buffer: int, base: Manifest, old: memoryview, new: memoryview, give_up: Callable[[], bool]
    ) -> Delta | None:
        """The delta from `old`, the bytes of `base`, to `new`, both in the canonical layout; None where none is offered.

        `give_up` is asked between two pieces. The code lies in this buffer's delta arena until the next call for it.
        """
        if not self._sample_pays(old, new):
            return None
        arena = self._arena(buffer)
        if arena is None:
            return None
        buckets, position = [], 0
        for offset in range(0, self._total, TARGET_BYTES):
            if give_up():
                return None
            length = min(TARGET_BYTES, self._total - offset)
            code = encode(old[offset : offset + length], new[offset : offset + length], self._word_bytes)
            if not code:
                continue
            if position + len(code) > self._most:
                return None
            arena.view[position : position + len(code)] = code
            buckets.append(
                DeltaBucket(
                    offset=position,
                    length=len(code),
                    hash=hash_bytes(code),
                    target_offset=offset,
                    target_length=length,
                )
            )
            position += len(code)
        return Delta(
            base_version=base.version,
            base_digest=base.root_digest,
            total_bytes=position,
            sources=[self._exporter.export(arena)] if buckets else [],
            buckets=buckets,
        )

    def _sample_pays(self, old: memoryview, new: memoryview) -> bool:
        """Whether so little changed in a sample that encoding it all may end under the bound."""
        step = max(_SAMPLE_BYTES, self._total // _SAMPLES // 64 * 64)
        ends = [(offset, min(offset + _SAMPLE_BYTES, self._total)) for offset in range(0, self._total, step)]
        changed = sum(
            changed_share(old[start:end], new[start:end], self._word_bytes) * (end - start) for start, end in ends
        )
        return changed * self._total <= _SAMPLE_SLACK * self._most * sum(end - start for start, end in ends)

    def _arena(self, buffer: int) -> Arena | None:
        if not self._arenas:
            try:
                self._arenas = [self._exporter.allocate(max(self._most, 1)) for _ in range(BUFFERS)]
            except RollmeshError as error:
                # Dense bytes always work: a delta only saves transfer.
                _log.warning("no arenas for weight deltas: publishing dense bytes alone", why=str(error))
                self._most = -1
                return None
        return self._arenas[buffer]
