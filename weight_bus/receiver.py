"""The receiver: the engine's side of the bus. It fills shadow memory while the engine decodes, then flips.

    idle ──stage(v)──► staging ──every hash good──► staged(v) ──commit(v)──► idle, serving v
      ▲                   │                            │
      └──── StageError ───┴──── stage(newer) starts over

Whatever goes wrong before the flip, the old version goes on being served, untouched. Every stage rewrites all of the
shadow: nothing of an abandoned one can survive into a version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.wire.errors import ConflictError
from weight_bus.arena import Arena, private_arena
from weight_bus.errors import StageError, TransportError
from weight_bus.layout import (
    hash_bytes,
    plan_mixed_layout,
    root_digest,
)
from weight_bus.manifest import Bucket, Layout, Manifest, Source, check_manifest
from weight_bus.scatter import BucketPlan, Gather, Scatter, default_plan
from weight_bus.transports.base import Reader
from weight_bus.views import dtype_name, flat_bytes


class WeightTarget(Protocol):
    """An engine's weights, by Hugging Face names: what is served, and as much memory again that is not.

    Both mappings have the same names, shapes and dtypes. Tensors may be views into fused ones. After `flip` the two have
    changed places (or the shadow was copied over; then live stays where it was).
    """

    def live(self) -> Mapping[str, torch.Tensor]: ...

    def shadow(self) -> Mapping[str, torch.Tensor]: ...

    def flip(self) -> None:
        """Serve the shadow. Called between two decode steps, on the thread that decodes."""
        ...


@dataclass(frozen=True)
class Staged:
    """A version that lies whole and verified in shadow memory."""

    version: int
    root_digest: str
    bytes_read: int
    seconds: float


class Receiver:
    """Stages, flips and proves an engine's weights.

    `stage` blocks and belongs on a background thread; `commit` belongs on the decode thread; `digest` may be called on
    any other. `version` is what the engine serves to begin with.
    """

    def __init__(self, target: WeightTarget, run_id: str, readers: Sequence[Reader], version: int = 0) -> None:
        self._target = target
        self._run_id = run_id
        self._readers = list(readers)
        self._version = version
        self._state = threading.Lock()
        """Held for moments: guards the fields below, and the flip."""
        self._memory = threading.Lock()
        """Held while shadow memory is written or live memory is hashed."""
        self._wanted = version
        self._staged: Staged | None = None
        self._staged_plan: BucketPlan | None = None
        self._plan: BucketPlan | None = None
        self._scratch: Arena | None = None

    @property
    def version(self) -> int:
        """The version that is served."""
        return self._version

    @property
    def staged_version(self) -> int | None:
        """The version that a commit would flip to."""
        staged = self._staged
        return None if staged is None else staged.version

    def stage(self, manifest: Manifest) -> Staged:
        """Pull every bucket, verify it and write it into the shadow.

        A newer version supersedes an uncommitted one, also one whose staging is still under way. The version that is
        already staged, asked for again with the same bytes, is answered from memory. Raises StageError, with the old
        version untouched, for another run, a version that is not newer, a wrong base, another layout, a bucket whose
        hash is wrong, or a source that cannot be read.
        """
        started = time.monotonic()
        self._admit(manifest)
        with self._memory:
            with self._state:
                staged = self._staged
                if staged is not None and staged.version == manifest.version:
                    if staged.root_digest == manifest.root_digest:
                        return staged
                    raise StageError(f"version {manifest.version} is staged with other bytes")
                self._check_current(manifest)
                self._staged = self._staged_plan = None
            plan = self._pull(manifest)
            staged = Staged(
                version=manifest.version,
                root_digest=manifest.root_digest,
                bytes_read=manifest.layout.total_bytes,
                seconds=time.monotonic() - started,
            )
            with self._state:
                self._check_current(manifest)
                self._staged, self._staged_plan = staged, plan
        return staged

    def commit(self, version: int) -> None:
        """Flip to the staged `version`. Raises ConflictError unless exactly it is staged."""
        with self._state:
            if self._staged is None or self._staged.version != version:
                found = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise ConflictError(f"version {version} cannot be committed: {found} is staged, {self._version} served")
            self._target.flip()
            self._version = version
            self._plan, self._staged, self._staged_plan = self._staged_plan, None, None

    def digest(self) -> str:
        """Root digest of the bytes that are really served, in the layout and buckets of the last manifest committed.

        Before the first commit: in the layout of the live weights as the target names them. Blocks while a stage runs.
        """
        with self._memory:
            while True:
                with self._state:
                    version, plan, live = self._version, self._plan, self._target.live()
                found = self._hash_live(plan or default_plan(live), live)
                # A flip meanwhile may have written over what was hashed; no stage can run, so there is at most one.
                if version == self._version:
                    return found

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _admit(self, manifest: Manifest) -> None:
        check_manifest(manifest)
        if manifest.run_id != self._run_id:
            raise StageError(f"a manifest of run {manifest.run_id!r} came to an engine of run {self._run_id!r}")
        if root_digest(bucket.hash for bucket in manifest.buckets) != manifest.root_digest:
            raise StageError(f"version {manifest.version}: the root digest does not follow from the bucket hashes")
        with self._state:
            self._check_current(manifest)
            self._wanted = manifest.version

    def _check_current(self, manifest: Manifest) -> None:
        if manifest.version <= self._version:
            raise StageError(f"version {manifest.version} is not newer than {self._version}, which is served")
        if manifest.version < self._wanted:
            raise StageError(f"version {manifest.version} is superseded by {self._wanted}")
        if manifest.base_version is not None and manifest.base_version != self._version:
            raise StageError(
                f"version {manifest.version} builds on {manifest.base_version}, this engine serves {self._version}"
            )

    def _pull(self, manifest: Manifest) -> BucketPlan:
        shadow = self._target.shadow()
        plan = self._plan
        if plan is None or not plan.fits(manifest):
            _check_layout(manifest.layout, shadow)
            plan = BucketPlan.of(manifest.layout, [(bucket.offset, bucket.length) for bucket in manifest.buckets])
        reader, source = self._choose(manifest)
        scatter = Scatter(plan.layout, shadow)
        for index, bucket in enumerate(manifest.buckets):
            if self._wanted != manifest.version:
                raise StageError(f"version {manifest.version} is superseded by {self._wanted}")
            out = self._scratch_for(plan).view[: bucket.length]
            self._read(reader, source, bucket, out, f"version {manifest.version}, bucket {index}")
            scatter.write(plan.pieces[index], flat_bytes(out))
        scatter.finish()
        return plan

    def _choose(self, manifest: Manifest) -> tuple[Reader, Source]:
        for reader in self._readers:
            for source in manifest.owners[0].sources:
                if reader.can_read(source):
                    return reader, source
        offered = ", ".join(type(source).__name__ for source in manifest.owners[0].sources) or "none"
        known = ", ".join(reader.name for reader in self._readers)
        raise StageError(
            f"version {manifest.version}: no source can be read (offered: {offered}; readers: {known})",
            "use the same weights.transport on both sides",
        )

    def _read(self, reader: Reader, source: Source, bucket: Bucket, out: memoryview, what: str) -> None:
        try:
            reader.read(source, bucket.offset, out)
        except TransportError as error:
            raise StageError(f"{what} could not be read ({error})") from error
        found = hash_bytes(out)
        if found != bucket.hash:
            raise StageError(f"{what} has the hash {found[:16]}…, the manifest says {bucket.hash[:16]}…")

    def _hash_live(self, plan: BucketPlan, live: Mapping[str, torch.Tensor]) -> str:
        gather = Gather(plan.layout, live)
        hashes = []
        for (_, length), pieces in zip(plan.ranges, plan.pieces, strict=True):
            view = self._scratch_for(plan).view[:length]
            gather.read(pieces, flat_bytes(view))
            hashes.append(hash_bytes(view))
        return root_digest(hashes)

    def _scratch_for(self, plan: BucketPlan) -> Arena:
        if self._scratch is None or self._scratch.nbytes < plan.largest:
            self._scratch = private_arena(plan.largest)
        return self._scratch


def _check_layout(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    offered = {entry.name: entry for entry in layout.tensors}
    missing, unknown = sorted(tensors.keys() - offered.keys()), sorted(offered.keys() - tensors.keys())
    if missing or unknown:
        raise StageError(
            f"the manifest lacks {_some(missing)} and names {_some(unknown)} that this engine does not know",
            "publish the model that the engine serves",
        )
    for name, entry in offered.items():
        shape, dtype = tuple(tensors[name].shape), dtype_name(tensors[name].dtype)
        if (shape, dtype) != (entry.shape, entry.dtype):
            raise StageError(f"{name} is {dtype}{list(shape)} here, {entry.dtype}{list(entry.shape)} in the manifest")
    planned = plan_mixed_layout({entry.name: (entry.shape, entry.dtype) for entry in layout.tensors})
    if planned != layout:
        raise StageError("the manifest's offsets are not those its names, shapes and dtypes give")


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
