"""The publisher: the trainer's side of the bus. It casts the weights into an arena once and says what lies there.

    training thread   publish(v)   wait for a free half ─► cast-copy ─► Publication                    returns
    background        hash the buckets ─► exchange with the other ranks ─► delta to v−1 ─► sign ─► manifest of v

    halves   |v−1, staged by receivers|   |v, just published|      the next version goes where the older one lies

A half is not written over while its version is leased (announced and not settled) or still being hashed: `publish` waits
for it, up to a deadline. A receiver that is two versions behind finds other bytes, sees it by the hash and takes the
newer version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec
import structlog
import torch

from services.wire.errors import ConflictError, DeadlineError, NotReadyError, RollmeshError, UsageError
from weight_bus.errors import TransportError
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
"""Those whose receivers read what they choose. A broadcast sends all to all, and a file is read by who has no base."""


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one publishing rank tells the others of a version: what it owns, or why it could not."""

    version: int
    layout_digest: str
    owner: Owner
    buckets: list[Bucket]
    error: str = ""


class Publisher:
    """One trainer's publisher, or one rank's of it. `publish` is called from one thread.

    `tensors` are the named weights (Hugging Face names, any shape, device or floating dtype; a tied weight under one
    name only). Their names, order and shapes are fixed for the publisher's life. `dtype` is the serving dtype by name,
    `key` the run's weight key. A delta is offered where it is no larger than `delta_max_ratio` of the dense bytes (0:
    never), over nixl and shm, by one rank alone. With `ranks`, tensors may be DTensors (FSDP2) and every rank publishes its
    own part.
    Raises UsageError for what cannot be served, TransportError when no arena can be had.
    """

    def __init__(
        self,
        run_id: str,
        tensors: Mapping[str, torch.Tensor],
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
        """The version whose bytes were put in place last, and its half; the training thread's."""
        self._newest_half = 1
        self._latest: Manifest | None = None
        """The manifest made last, and its half; the background thread's."""
        self._latest_half = 1
        self._background = ThreadPoolExecutor(1, "weight-publisher")

    @property
    def layout(self) -> Layout:
        return self._plan.layout

    @property
    def latest(self) -> Manifest | None:
        """The manifest that was made last."""
        return self._latest

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, leased: bool = False) -> Publication:
        """Put `version` in place; its manifest is made in the background and had from the Publication.

        Blocks for one cast-copy of all bytes, and until the half it goes into is free. `leased`: the half is kept until
        `release(version)`, or until making the manifest fails. The same version with the same bytes answers its first
        manifest again; with other bytes the Publication fails with ConflictError, and nothing was touched that a
        receiver may read. Raises ConflictError for an older version, DeadlineError when no half comes free in time,
        UsageError when names or shapes are not those the publisher was made for.
        """
        newest = self._newest
        if newest is not None and version < newest:
            raise ConflictError(f"version {version} is older than {newest}, which is published")
        self._check(tensors)
        again = version == newest
        half = 1 - self._newest_half
        self._leases.begin(half, version, leased=leased and not again, wait_s=self._wait_s)
        try:
            self._arenas[half].fill(tensors)
        except BaseException:
            self._leases.abandon(half, version)
            raise
        self._leases.copied(half, version)
        if not again:
            self._newest, self._newest_half = version, half
        return Publication(version, self._background.submit(self._make, version, half, again))

    def release(self, version: int) -> None:
        """The version has settled: its half may be written over. A version that is not leased is nothing to release."""
        self._leases.let_go("announced and not settled", version)

    def close(self) -> None:
        """Withdraw the arenas. Engines keep what they serve; nothing more can be staged."""
        self._background.shutdown(wait=True, cancel_futures=True)
        self._arenas.clear()
        self._exporter.close()

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._arenas:
            raise UsageError("the publisher is closed", "make a new one")
        if len(tensors) != len(self.layout.tensors):
            raise UsageError(f"{len(tensors)} tensors to publish, {len(self.layout.tensors)} planned", "give them all")
        for entry in self.layout.tensors:
            tensor = tensors.get(entry.name)
            if tensor is None or tensor.shape != entry.shape:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise UsageError(f"tensor {entry.name} is {found}, planned was {entry.shape}", "make a new publisher")

    def _make(self, version: int, half: int, again: bool) -> Manifest:
        try:
            draft = self._draft(version, half)
            if again:
                return self._same_again(draft)
            manifest = self._offered(draft, half)
        except BaseException:
            if again:
                self._leases.abandon(half, version)
            else:
                self.release(version)
            raise
        finally:
            self._leases.let_go("being hashed", version, half)
        self._latest, self._latest_half = manifest, half
        return manifest

    def _same_again(self, draft: Manifest) -> Manifest:
        latest = self._latest
        if latest is None or latest.version != draft.version:
            raise ConflictError(f"version {draft.version} could not be published at first", "publish a newer version")
        if latest.root_digest != draft.root_digest:
            raise ConflictError(
                f"version {draft.version} is published with other bytes", "take one optimizer step first"
            )
        return latest

    def _draft(self, version: int, half: int) -> Manifest:
        """The version's manifest without signature and delta; a publisher alone leaves its sources out, too."""
        owners, buckets = self._alone(half) if self._ranks is None else self._with_ranks(self._ranks, version, half)
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

    def _alone(self, half: int) -> tuple[list[Owner], list[Bucket]]:
        return [Owner(total_bytes=self._plan.total_bytes, sources=[])], self._hash(half, 0)

    def _with_ranks(self, ranks: Ranks, version: int, half: int) -> tuple[list[Owner], list[Bucket]]:
        parts = [
            msgspec.msgpack.decode(part, type=RankPart)
            for part in ranks.exchange(self._part(version, half, ranks.rank))
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

    def _part(self, version: int, half: int, rank: int) -> bytes:
        arena, error, buckets = self._arenas[half].arena, "", []
        owner = Owner(total_bytes=self._plan.total_bytes, sources=[], shards=self._plan.shards)
        try:
            buckets = self._hash(half, rank)
            sources = [] if arena is None else [self._exporter.export(arena)]
            owner = msgspec.structs.replace(owner, sources=sources)
        except RollmeshError as failed:
            # The others must hear of it, or they wait for this rank until the deadline.
            error = str(failed)
        return msgspec.msgpack.encode(
            RankPart(version=version, layout_digest=self.layout.digest, owner=owner, buckets=buckets, error=error)
        )

    def _hash(self, half: int, owner: int) -> list[Bucket]:
        view = self._arenas[half].view
        return [
            Bucket(owner=owner, offset=offset, length=length, hash=_hash(view[offset : offset + length]))
            for offset, length in self._ranges
        ]

    def _offered(self, draft: Manifest, half: int) -> Manifest:
        """The draft with its sources, its delta and its signature."""
        arena = self._arenas[half].arena
        if self._ranks is None and arena is not None:
            source = self._exporter.export(arena, draft)
            draft = msgspec.structs.replace(draft, owners=[Owner(total_bytes=arena.nbytes, sources=[source])])
        delta = self._delta(half)
        if delta is not None:
            draft = msgspec.structs.replace(draft, kind="delta", base_version=delta.base_version, delta=delta)
        return sign(draft, self._key)

    def _delta(self, half: int) -> Delta | None:
        base, other = self._latest, 1 - half
        if self._deltas is None or base is None or self._latest_half != other:
            return None
        if not self._leases.hold_base(other, base.version):
            return None
        try:
            old, new = self._arenas[other].view, self._arenas[half].view
            return self._deltas.make(half, base, old, new, lambda: self._leases.wanted(other))
        finally:
            self._leases.let_go("the base of a delta", base.version, other)


def _hash(data: memoryview) -> str:
    return hash_bytes(data, threads=1 if len(data) < _PARALLEL_HASH_BYTES else _HASH_THREADS)


# What `publish` hands back at once: a version whose bytes are in place, and whose manifest is being made.

MANIFEST_DEADLINE_S = 60.0


class Publication:
    """`future` comes true with the manifest, or fails with what stood against it (ConflictError for a reused version)."""

    def __init__(self, version: int, future: Future[Manifest]) -> None:
        self.version = version
        self.future = future

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


# Makes the delta that a manifest offers beside its dense bytes, where one is small enough and nobody is kept waiting.
#
# sample ─ too much changed? ─► none
# each 4 MiB of both halves ─► code ─► the delta arena of this half      over the share, or the trainer waits ─► none

TARGET_BYTES = 4 << 20
"""How much of the layout one delta bucket changes: as fast as any size that was measured, and soon given up."""
_SAMPLES, _SAMPLE_BYTES = 8, 64 << 10
_SAMPLE_SLACK = 1.5
"""A code takes 0.85 to 1.3 of the share of words that changed (measured): far more than the bound cannot end under it."""

_log = structlog.get_logger()


class DeltaMaker:
    """Deltas of at most `max_ratio` of the layout's bytes. Its two arenas are made when the first delta pays."""

    def __init__(self, exporter: Exporter, layout: Layout, max_ratio: float) -> None:
        self._exporter = exporter
        self._total = layout.total_bytes
        self._most = int(max_ratio * layout.total_bytes)
        smallest = min(ITEM_BYTES[entry.dtype] for entry in layout.tensors)
        self._word_bytes = min(smallest, max(WORD_DTYPES))
        self._arenas: list[Arena] = []

    def make(
        self, half: int, base: Manifest, old: memoryview, new: memoryview, give_up: Callable[[], bool]
    ) -> Delta | None:
        """The delta from `old`, the bytes of `base`, to `new`, both in the canonical layout; None where none is offered.

        `give_up` is asked between two pieces. The code lies in this half's delta arena until the next call for it.
        """
        if not self._sample_pays(old, new):
            return None
        arena = self._arena(half)
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

    def _arena(self, half: int) -> Arena | None:
        if not self._arenas:
            try:
                self._arenas = [self._exporter.allocate(max(self._most, 1)) for _ in range(BUFFERS)]
            except RollmeshError as error:
                # Dense bytes do for everyone: a delta only saves some of their way.
                _log.warning("no arenas for weight deltas: publishing dense bytes alone", why=str(error))
                self._most = -1
                return None
        return self._arenas[half]
