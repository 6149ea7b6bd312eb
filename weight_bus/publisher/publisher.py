"""The publisher: the trainer's side of the weight bus. It casts weights into an arena buffer and makes the manifest.

    training thread   publish(v)   wait for a free buffer ─► cast-copy ─► Publication                  returns
    background        hash the buckets, with the other ranks ─► delta to v−1 ─► sign ─► manifest of v

    buffers   |v−1, staged by receivers|   |v, just published|      the next version overwrites the older one
    one       |v, staged by receivers|                              the next waits until v has settled, and overwrites it

A buffer is not overwritten while its version is leased (announced and not settled) or still being hashed: `publish` waits
for it, up to a deadline. A receiver that reads a version which is being overwritten sees other bytes by the hash, and takes
the newer version.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec

from services.wire.errors import ConflictError, DeadlineError, NotReadyError, RollmeshError, UsageError
from weight_bus.errors import TransportError
from weight_bus.manifest.computed import PublishedTensor
from weight_bus.manifest.layout import ITEM_BYTES, hash_bytes, plan_buckets, root_digest
from weight_bus.manifest.manifest import (
    Adapter,
    Bucket,
    Delta,
    DeltaPart,
    Layout,
    Manifest,
    Owner,
    Source,
    check_manifest,
    sign,
)
from weight_bus.manifest.tensors import dtype_of
from weight_bus.publisher.arena_buffer import ArenaBuffer
from weight_bus.publisher.bucket_hashes import BucketHashes
from weight_bus.publisher.buffer_leases import BUFFERS, BufferLeases
from weight_bus.publisher.delta_maker import DeltaMaker
from weight_bus.publisher.ranks import Ranks
from weight_bus.publisher.sharding import plan_owner
from weight_bus.transports.base import Exporter

_PARALLEL_HASH_BYTES = 1 << 20
_HASH_THREADS = 2
_RANGE_TRANSPORTS = ("nixl", "shm")
"""Whose receivers read ranges: several ranks' and deltas'. A broadcast sends all, a file is for engines without a base."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """For the other ranks, what is to be known of one rank's part of a version before any bucket is hashed: where it is to
    be had, or why it is not.
    """

    version: int
    sources: list[Source]
    error: str = ""


class HashedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets that one rank has hashed, by number, and how its part changed since `base_version`, where that pays."""

    buckets: dict[int, Bucket]
    base_version: int = -1
    base_digest: str = ""
    delta: DeltaPart | None = None


class Publisher:
    """One trainer's publisher, or one rank's of it. `publish` is called from one thread.

    `tensors` are the named weights (Hugging Face names, any shape, device or floating dtype; a tied weight under one name
    only), or how one is computed. Their names, order and shapes are fixed for the publisher's life. `dtype` is the serving
    dtype by name, `key` the run's weight key. A delta is offered where it is no larger than `delta_max_ratio` of the dense
    bytes (0: never), over nixl and shm. `buffers`: 2, or 1 for half the memory and no deltas, whose base would be
    overwritten; what is copied then overwrites the last version, whatever becomes of it. With `ranks`, tensors may be
    DTensors of any placement, or parts of them, and every rank publishes its own part; all make the publisher, and call it,
    alike. `adapter`: what `tensors` are where they are no whole model's (`weight_bus.manifest.adapter`). Raises UsageError
    for what cannot be served, TransportError when no arena can be had.
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
        buffers: int = BUFFERS,
        ranks: Ranks | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        self._run_id, self._exporter, self._key, self._ranks = run_id, exporter, key, ranks
        self._adapter = adapter
        self.wait_s = wait_s
        """How long `publish` waits for an arena."""
        if ranks is not None and ranks.size > 1 and exporter.name not in _RANGE_TRANSPORTS:
            # Engines read all ranks' arenas in turns, bucket by bucket; a broadcast has one order, and a file one owner.
            raise UsageError(
                f"several ranks cannot publish over {exporter.name}", "use weights.transport=nixl, or shm on one host"
            )
        if buffers == 1 and delta_max_ratio > 0:
            raise UsageError("one arena keeps no version that a delta could be to", "set weights.delta=off")
        self._plan = plan_owner(tensors, dtype, ranks)
        self._ranges = plan_buckets(self.layout.total_bytes, bucket_bytes)
        self._shared: BucketHashes | None = None
        if ranks is not None and self._plan.owners is not None:
            self._shared = BucketHashes(self.layout, self._plan.owners, bucket_bytes, ranks)
        # All before the first export: a source may describe all registered memory.
        self._arenas = [ArenaBuffer(exporter, self._plan, dtype_of(dtype)) for _ in range(buffers)]
        offers = exporter.name in _RANGE_TRANSPORTS and delta_max_ratio > 0
        item = ITEM_BYTES[dtype]
        self._deltas = DeltaMaker(exporter, self._plan.total_bytes, item, delta_max_ratio) if offers else None
        self._leases = BufferLeases(buffers)
        self._newest: int | None = None
        """The version copied last, and its buffer; used by the training thread."""
        self._newest_buffer = buffers - 1
        self.latest: Manifest | None = None
        """The manifest made last, and its buffer; used by the background thread."""
        self._latest_buffer = buffers - 1
        self._background = ThreadPoolExecutor(1, "weight-publisher")

    @property
    def layout(self) -> Layout:
        return self._plan.layout

    @property
    def held_bytes(self) -> int:
        """This rank's memory for publishing: its arenas, those of deltas, and what buckets are put together in."""
        arenas = sum(buffer.nbytes for buffer in self._arenas)
        deltas = 0 if self._deltas is None else self._deltas.held_bytes
        return arenas + deltas + (0 if self._shared is None else self._shared.held_bytes)

    def publish(self, version: int, tensors: Mapping[str, PublishedTensor], *, leased: bool = False) -> Publication:
        """Put `version` in place; its manifest is made in the background and had from the Publication.

        Blocks for one cast-copy of all bytes, and until the buffer it goes into is free. `leased`: the buffer is kept until
        `release(version)`, or until making the manifest fails. The same version with the same bytes answers its first
        manifest again; with other bytes the Publication fails with ConflictError, and where there are two buffers nothing
        was touched that a receiver may read. Raises ConflictError for an older version, DeadlineError when no buffer comes
        free in time, UsageError when names or shapes are not those the publisher was made for.
        """
        newest = self._newest
        if newest is not None and version < newest:
            raise ConflictError(f"version {version} is older than {newest}, which is published")
        self._check(tensors)
        again = version == newest
        buffer = self._next_buffer
        self._leases.begin(buffer, version, leased=leased and not again, wait_s=self.wait_s)
        try:
            self.begun(version)
            self._arenas[buffer].fill(tensors)
        except BaseException:
            self._leases.abandon(buffer, version)
            raise
        self._leases.copied(buffer, version)
        if not again:
            self._newest, self._newest_buffer = version, buffer
        return Publication(version, self._background.submit(self._make, version, buffer, again))

    def begun(self, version: int) -> None:
        """Called once an arena is free for `version`, before a weight is copied: a rank that leads may tell the others.

        Weights that are computed by all ranks together need them to copy at the same time.
        """

    def digest(self, version: int, tensors: Mapping[str, PublishedTensor]) -> str:
        """The root digest that these weights would be published under as `version`; nobody can read them yet.

        Takes the time of a publication. With one buffer the version in it is overwritten. Raises as `publish` does, but
        for versions that are not newer.
        """
        self._check(tensors)
        buffer = self._next_buffer
        self._leases.begin(buffer, version, leased=False, wait_s=self.wait_s)
        try:
            self._arenas[buffer].fill(tensors)
            return self._background.submit(self._draft, version, buffer, final=False).result().root_digest
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

    @property
    def _next_buffer(self) -> int:
        return (self._newest_buffer + 1) % len(self._arenas)

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
            draft = self._draft(version, buffer, final=not again)
            if again:
                return self._same_again(draft)
            manifest = sign(draft, self._key)
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

    def _draft(self, version: int, buffer: int, *, final: bool) -> Manifest:
        """The version's manifest without signature; where it is not `final`, without a delta and maybe without sources."""
        if self._ranks is not None and self._shared is not None:
            return self._with_ranks(self._ranks, self._shared, version, buffer, final=final)
        held, arena = self._arenas[buffer], self._arenas[buffer].arena
        buckets = [
            Bucket(offset=offset, length=length, hash=_hash(held.bucket(offset, length)))
            for offset, length in self._ranges
        ]
        draft = self._drawn_up(version, [Owner(total_bytes=held.nbytes, sources=[])], buckets)
        if not final:
            return draft
        if arena is not None:
            owner = Owner(total_bytes=arena.nbytes, sources=[self._exporter.export(arena, draft)])
            draft = msgspec.structs.replace(draft, owners=[owner])
        delta, base = self._delta(buffer), self.latest
        return draft if delta is None or base is None else _with_delta(draft, base.version, base.root_digest, [delta])

    def _drawn_up(self, version: int, owners: list[Owner], buckets: list[Bucket]) -> Manifest:
        draft = Manifest(
            run_id=self._run_id,
            version=version,
            layout=self.layout,
            owners=owners,
            buckets=buckets,
            root_digest=root_digest(bucket.hash for bucket in buckets),
            adapter=self._adapter,
        )
        check_manifest(draft)
        return draft

    def _with_ranks(self, ranks: Ranks, shared: BucketHashes, version: int, buffer: int, *, final: bool) -> Manifest:
        sent = msgspec.msgpack.encode(self._rank_part(version, buffer, final=final))
        parts = [msgspec.msgpack.decode(part, type=RankPart) for part in ranks.exchange(sent)]
        for number, part in enumerate(parts):
            if part.error:
                raise TransportError(f"rank {number} could not publish version {version} ({part.error})")
            if part.version != version:
                raise ConflictError(f"rank {number} publishes version {part.version}, rank {ranks.rank} {version}")
        base = self.latest
        hashed = HashedPart(buckets=shared.of(self._arenas[buffer].host, _hash))
        if final and base is not None:
            hashed = msgspec.structs.replace(
                hashed, base_version=base.version, base_digest=base.root_digest, delta=self._delta(buffer)
            )
        everyone = [
            msgspec.msgpack.decode(part, type=HashedPart) for part in ranks.exchange(msgspec.msgpack.encode(hashed))
        ]
        buckets = dict(item for each in everyone for item in each.buckets.items())
        assert self._plan.owners is not None
        owners = [
            Owner(total_bytes=total, sources=part.sources, shards=shards)
            for total, part, shards in zip(self._plan.totals, parts, self._plan.owners, strict=True)
        ]
        draft = self._drawn_up(version, owners, [buckets[number] for number in sorted(buckets)])
        deltas = [each.delta for each in everyone if each.delta is not None and each.base_digest == hashed.base_digest]
        if len(deltas) < ranks.size:
            return draft
        return _with_delta(draft, hashed.base_version, hashed.base_digest, deltas)

    def _rank_part(self, version: int, buffer: int, *, final: bool) -> RankPart:
        arena = self._arenas[buffer].arena
        try:
            sources = [self._exporter.export(arena)] if arena is not None and final else []
        except RollmeshError as failed:
            # The other ranks must be told, or they wait for this one until the deadline.
            return RankPart(version=version, sources=[], error=str(failed))
        return RankPart(version=version, sources=sources)

    def _delta(self, buffer: int) -> DeltaPart | None:
        base, other = self.latest, self._latest_buffer
        if self._deltas is None or base is None or other == buffer:
            return None
        if not self._leases.lease_base(other, base.version):
            return None
        try:
            old, new = self._arenas[other].host, self._arenas[buffer].host
            return self._deltas.make(buffer, old, new, lambda: self._leases.wanted(other))
        finally:
            self._leases.let_go("the base of a delta", base.version, other)


def _with_delta(draft: Manifest, base_version: int, base_digest: str, parts: list[DeltaPart]) -> Manifest:
    delta = Delta(base_version=base_version, base_digest=base_digest, parts=parts)
    return msgspec.structs.replace(draft, kind="delta", base_version=base_version, delta=delta)


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
