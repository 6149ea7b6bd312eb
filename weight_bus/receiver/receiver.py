"""The receiver: the engine's side of the weight bus. It stages a version in shadow memory while decoding, then flips.

    idle ──stage(v)──► staging ──every hash good──► staged(v) ──commit(v)──► idle, serving v ──rollback──► idle, serving
      ▲                   │                            │                                                   the one before
      └──── StageError ───┴──── stage(newer) starts over

Whatever goes wrong before the flip, the old version is served on, unchanged. Every stage rewrites the whole shadow, so
nothing of an abandoned one can remain in a version. After a commit the shadow is the version before, complete until the
next stage begins to write: a rollback by one version is then a flip.

A tensor parallel rank has slices of some tensors. With the engine's other ranks it reads whole buckets, which the hashes
are of (`weight_bus.receiver.shared_staging`), keeps its slices and remembers their hash: as long as its weights have that
hash, it serves the manifest's bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import structlog
import torch

from services.wire.errors import RollmeshError
from services.wire.weights_api import DigestAnswer, StageAnswer
from weight_bus.errors import StageError
from weight_bus.manifest.adapter import Base, check_whole
from weight_bus.manifest.layout import root_digest
from weight_bus.manifest.manifest import Manifest, check_manifest, check_signature
from weight_bus.receiver.buckets import (
    BucketPlan,
    Memories,
    Memory,
    check_fits,
    default_plan,
    digest_of,
    own_digest,
    throttle_beside,
)
from weight_bus.receiver.job import Progress, Scratch, StageJob
from weight_bus.receiver.rank_sharing import Meeting, RankSharing
from weight_bus.receiver.shared_staging import SharedStage
from weight_bus.receiver.slices import Slice
from weight_bus.receiver.staging import DeltaStage, DenseStage
from weight_bus.receiver.weight_slots import WeightSlots, Whole
from weight_bus.transports.base import NotAtOnceError, Reader

AT_ONCE_BYTES = 1 << 20
AT_ONCE_TENSORS = 256
"""Above either, `stage_at_once` would keep an event loop for more than a millisecond or two."""

_log = structlog.get_logger()


class WeightTarget(Protocol):
    """An engine's weights, by Hugging Face names: what is served, and memory for as much again.

    Both mappings have the same names, shapes and dtypes. Tensors may be views into fused ones. `live` is read alone, as it
    is published, whatever form the engine has it in (`weight_bus.receiver.buckets.RestoredTensors`).
    """

    def live(self) -> Mapping[str, torch.Tensor]: ...

    def shadow(self) -> Mapping[str, torch.Tensor]: ...

    def flip(self) -> None:
        """Serve the shadow. Called between two steps, on the thread that decodes."""
        ...

    def flip_back(self) -> None:
        """Serve what was served before the last flip. What it gives up is then the shadow, whole."""
        ...


class Receiver:
    """Stages, flips and hashes an engine's weights.

    `stage` blocks and belongs on a background thread, `stage_at_once` does not; `commit` and `rollback` belong on the
    decode thread; `digest` may be called on any other. `version` is what the engine serves to begin with; `key` the run's
    weight key, with which every manifest must be signed (None: any is taken). `prepare` is called with a version whose
    bytes are in the shadow, before it counts as staged, for what the engine derives from them; what it raises, `stage`
    raises. `slices`: which of the target's tensors are parts of the manifest's, and which part. `sharing`: memory that the
    engine's ranks share; a rank without it reads all dense bytes by itself. `base`: what the adapters that the target holds
    belong to; None: it holds a whole model.
    """

    def __init__(
        self,
        target: WeightTarget,
        run_id: str,
        readers: Sequence[Reader],
        version: int = 0,
        key: str | None = None,
        prepare: Callable[[int], None] | None = None,
        slices: Mapping[str, Slice] | None = None,
        sharing: RankSharing | None = None,
        base: Base | None = None,
    ) -> None:
        self.target = target
        self._base = base
        self._sharing = sharing
        self._slices = slices or {}
        self._run_id = run_id
        self._readers = list(readers)
        self._key = key
        self._prepare = prepare
        self._state = threading.Lock()
        """Held for moments: guards the fields below, and the flip."""
        self._memory = threading.Lock()
        """Held while shadow memory is written or live memory is hashed."""
        self._slots = WeightSlots(Whole(version, None))
        self._wanted = version
        self._staged: StageAnswer | None = None
        self._plan: BucketPlan | None = None
        self._plans: dict[int, BucketPlan] = {}
        """By version, of those in the slots."""
        self._kept_digests: dict[int, str] = {}
        """By version, of those in the slots: the digest of an engine's slices, in their own layout."""
        self.progress: Progress | None = None
        """Of the stage under way, else of the last one."""
        self._scratch = Scratch()
        self._memories = Memories(slices)

    @property
    def version(self) -> int:
        """The version that is served."""
        return self._slots.served.version

    @property
    def staged_version(self) -> int | None:
        """The version that a commit would flip to."""
        staged = self._slots.staged
        return None if staged is None else staged.version

    @property
    def kept_version(self) -> int | None:
        """The version that a rollback would flip to."""
        kept = self._slots.kept
        return None if kept is None else kept.version

    def stage(self, manifest: Manifest, call: int | None = None) -> StageAnswer:
        """Bring the version into the shadow, by the delta it offers or from its dense bytes, and verify every bucket.

        A newer version supersedes an uncommitted one, also one whose staging is still under way. What lies whole in the
        shadow (staged already, or withdrawn by a rollback) needs no reading. Raises StageError, with the old version
        untouched, for another run, a missing signature, a version that is not newer, another layout, a bucket whose hash
        is wrong, or sources that cannot be read. The version kept for a rollback is given up when the first byte is read.

        `call`: the same ascending number on all ranks of the engine, which then share the reading.
        """
        self._admit(manifest)
        with self._memory:
            if call is None or self._sharing is None or not self._sharing.complete:
                return self._stage(manifest)

            check = partial(self._check_wanted, manifest.version)
            with self._sharing.call(call, check, f"version {manifest.version}") as meeting:
                return self._stage(manifest, meeting=meeting)

    def stage_at_once(self, manifest: Manifest) -> StageAnswer | None:
        """`stage` for a thread that must not wait, such as an event loop's; None: `stage` it on another one.

        That is so for all but a small version, whose bytes can be copied here and now. The way to another thread and back
        takes longer than such a copy, beside threads that decode.
        """
        small = manifest.total_bytes <= AT_ONCE_BYTES and len(manifest.layout.tensors) <= AT_ONCE_TENSORS
        apart = self._prepare is not None or self._slices or self._base is not None
        if not small or manifest.delta is not None or apart:
            return None
        self._admit(manifest)
        if not self._memory.acquire(blocking=False):
            return None
        try:
            return self._stage(manifest, at_once=True)
        except NotAtOnceError:
            return None
        finally:
            self._memory.release()

    def _stage(self, manifest: Manifest, *, at_once: bool = False, meeting: Meeting | None = None) -> StageAnswer:
        """With the memory's lock."""
        progress, worked = Progress(manifest.version, manifest.total_bytes), time.thread_time()
        with self._state:
            known = self._known(manifest)
            if known is not None:
                if meeting is not None:
                    meeting.skip()
                return known
            self._check_current(manifest)
        plan = self._plan_of(manifest)
        self.progress = progress
        read = self._write(manifest, plan, progress, at_once=at_once, meeting=meeting)
        kept = own_digest(self.target.shadow()) if self._slices else None
        if self._prepare is not None:
            # It may bring the shadow into another form.
            self._prepare(manifest.version)
        if not at_once:
            throttle_beside(self.target.shadow().values()).settle(time.thread_time() - worked)
        staged = StageAnswer(manifest.version, manifest.root_digest, read, progress.seconds)
        with self._state:
            self._check_current(manifest)
            self._slots = self._slots.with_staged(Whole(manifest.version, manifest.root_digest))
            self._staged, self._plan = staged, plan
            self._remember(manifest.version, plan, kept)
        return staged

    def commit(self, version: int) -> None:
        """Flip to the staged `version`; nothing to do where it is served already. Raises ConflictError if neither."""
        with self._state:
            if version != self.version:
                self._serve(self._slots.committed(version))

    def rollback(self, version: int) -> None:
        """Flip back to `version`, which was served before; nothing to do where it is served already.

        Raises ConflictError where it is not kept: only one step back, and only until the next stage has begun to write.
        """
        with self._state:
            if version != self.version:
                self._serve(self._slots.rolled_back(version))
                self._wanted = version

    def undo(self, version: int) -> None:
        """Undo the flip to `version`, if it was the last one: another rank refused it."""
        with self._state:
            if version == self.version:
                self._serve(self._slots.undone())

    def digest(self) -> DigestAnswer:
        """Root digest of the bytes that are really served, in the layout and buckets of their manifest.

        Without one: in the layout of the live weights as the target names them. Of slices: the manifest's own, as long as
        they are those that were kept of it; else theirs. Blocks while a stage runs.
        """
        with self._memory:
            while True:
                with self._state:
                    served, live = self._slots.served, self.target.live()
                found = self._digest_of(served, live)
                # A flip meanwhile may have changed what was hashed; no stage can run, so there are few.
                if served == self._slots.served:
                    return DigestAnswer(served.version, found)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._scratch.close()

    def _digest_of(self, served: Whole, live: Mapping[str, torch.Tensor]) -> str:
        if not self._slices:
            return digest_of(self._plans.get(served.version) or default_plan(live), live)
        found = own_digest(live)
        as_kept = found == self._kept_digests.get(served.version)
        return served.root_digest if as_kept and served.root_digest is not None else found

    def _serve(self, slots: WeightSlots) -> None:
        if slots.served != self._slots.served:
            if self._slots.kept is not None:
                self.target.flip_back()
            else:
                self.target.flip()
        self._slots, self._staged = slots, None

    def _known(self, manifest: Manifest) -> StageAnswer | None:
        """The answer for a version that lies in the shadow already. Raises StageError where that has other bytes."""
        staged = self._slots.staged
        if staged is not None and staged.version == manifest.version and staged.root_digest != manifest.root_digest:
            raise StageError(f"version {manifest.version} is staged with other bytes")
        if not self._slots.has(manifest.version, manifest.root_digest):
            return None
        if self._staged is None:
            self._slots = self._slots.with_staged(Whole(manifest.version, manifest.root_digest))
            self._staged = StageAnswer(manifest.version, manifest.root_digest, 0, 0.0)
        return self._staged

    def _admit(self, manifest: Manifest) -> None:
        check_manifest(manifest)
        check_signature(manifest, self._key)
        if self._base is None:
            check_whole(manifest)
        else:
            self._base.check(manifest)
        if manifest.run_id != self._run_id:
            raise StageError(f"a manifest of run {manifest.run_id!r} came to an engine of run {self._run_id!r}")
        if root_digest(bucket.hash for bucket in manifest.buckets) != manifest.root_digest:
            raise StageError(f"version {manifest.version}: the root digest does not follow from the bucket hashes")
        with self._state:
            self._check_current(manifest)
            self._wanted = manifest.version

    def _check_current(self, manifest: Manifest) -> None:
        if manifest.version <= self.version:
            raise StageError(f"version {manifest.version} is not newer than {self.version}, which is served")
        self._check_wanted(manifest.version)

    def _check_wanted(self, version: int) -> None:
        if version < self._wanted:
            raise StageError(f"version {version} is superseded by {self._wanted}")

    def _plan_of(self, manifest: Manifest) -> BucketPlan:
        if self._plan is not None and self._plan.fits(manifest):
            return self._plan
        check_fits(manifest.layout, self.target.shadow(), self._slices)
        return BucketPlan.of_manifest(manifest)

    def _write(
        self, manifest: Manifest, plan: BucketPlan, progress: Progress, *, at_once: bool, meeting: Meeting | None
    ) -> int:
        """Fill the shadow; returns the bytes that travelled."""
        check = partial(self._check_wanted, manifest.version)
        job = StageJob(manifest, plan, self._readers, self._scratch, progress, check, at_once)
        if meeting is not None and self._sharing is not None:
            stage = SharedStage(job, self._sharing, meeting)
            served, shadow = self._begin_to_write(manifest, plan)
            as_base = manifest.delta is not None and served.root_digest == manifest.delta.base_digest
            stage.run(self._memories.of(plan.layout, self.target.live()) if as_base else None, shadow)
            # What fails from here on is this rank's own.
            meeting.done()
            return progress.bytes_read
        delta = self._delta_to_take(job)
        try:
            dense = DenseStage(job)
        except StageError:
            if delta is None:
                raise
            dense = None
        served, shadow = self._begin_to_write(manifest, plan)
        if delta is not None and served.version == manifest.base_version:
            try:
                delta.run(self._memories.of(plan.layout, self.target.live()), shadow)
            except RollmeshError as error:
                check()
                if dense is None:
                    raise
                _log.warning("delta not taken, dense bytes instead", version=manifest.version, why=str(error))
            else:
                return progress.bytes_read
        if dense is None:
            raise StageError(
                f"version {manifest.version} can be had as a delta from {manifest.base_version} only, and "
                f"{served.version} is served"
            )
        progress.begin_anew(manifest.total_bytes)
        dense.run(shadow)
        return progress.bytes_read

    def _delta_to_take(self, job: StageJob) -> DeltaStage | None:
        """The delta, where this engine serves exactly its base and can read one of its sources."""
        manifest, delta, served = job.manifest, job.manifest.delta, self._slots.served
        if delta is None or served.version != delta.base_version or self._slices:
            return None
        # Weights that were loaded from a folder were never hashed in the manifest's buckets.
        digest = served.root_digest or digest_of(job.plan, self.target.live())
        if digest != delta.base_digest:
            _log.warning("another base is served", version=manifest.version, base=delta.base_version)
            return None
        try:
            return DeltaStage(job, delta)
        except StageError as error:
            # As where a delta is offered over one transport alone: what it saves is lost, and nothing else.
            _log.info("all bytes instead of a delta", version=manifest.version, why=str(error))
            return None

    def _begin_to_write(self, manifest: Manifest, plan: BucketPlan) -> tuple[Whole, Memory]:
        """What is served, and the shadow: nothing can flip any more until a version is staged."""
        with self._state:
            self._check_current(manifest)
            self._slots, self._staged = self._slots.writing(), None
            return self._slots.served, self._memories.of(plan.layout, self.target.shadow())

    def _remember(self, version: int, plan: BucketPlan, kept: str | None) -> None:
        kept_versions = {self.version, version}
        self._plans = {known: own for known, own in self._plans.items() if known in kept_versions} | {version: plan}
        digests = {known: own for known, own in self._kept_digests.items() if known in kept_versions}
        self._kept_digests = digests if kept is None else digests | {version: kept}
