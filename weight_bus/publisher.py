"""The publisher: the trainer's side of the bus. It casts the weights into an arena once and says what lies there.

    publish(v)    arena[v mod 2] ◄─ cast ─ tensors;  hash the buckets;  manifest of v
                  arena[v−1 mod 2] stays whole, so that a receiver which still stages v−1 can end

A receiver that is two versions behind finds its arena overwritten, sees it by the hash and takes the newer version.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future

import torch

from services.wire.errors import ConflictError, UsageError
from weight_bus.arena import Arena
from weight_bus.layout import hash_bytes, plan_buckets, plan_layout, root_digest
from weight_bus.manifest import Bucket, Layout, Manifest, Owner
from weight_bus.publication import Publication
from weight_bus.transports.base import Exporter
from weight_bus.views import dtype_of, flat_bytes, tensor_at

_PARALLEL_HASH_BYTES = 1 << 20


class Publisher:
    """One trainer's publisher. Not thread-safe: call it from the training thread.

    `tensors` are the named weights (Hugging Face names, any shape, device or floating dtype; a tied weight under one
    name only). Their names, order and shapes are fixed for the publisher's life. `dtype` is the serving dtype by name.
    Raises UsageError for a dtype that cannot be served, TransportError when no arena can be had.
    """

    def __init__(
        self, run_id: str, tensors: Mapping[str, torch.Tensor], dtype: str, exporter: Exporter, bucket_bytes: int
    ) -> None:
        dtype_of(dtype)
        self._run_id = run_id
        self._exporter = exporter
        self._layout = plan_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
        self._ranges = plan_buckets(self._layout.total_bytes, bucket_bytes)
        # Both before the first export: a source may describe all registered memory.
        self._halves = [_Half(exporter.allocate(self._layout.total_bytes), self._layout) for _ in range(2)]
        self._latest: Manifest | None = None

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def latest(self) -> Manifest | None:
        """The manifest of the version published last."""
        return self._latest

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Publication:
        """As `_publish`; the manifest is had from the Publication."""
        future: Future[Manifest] = Future()
        future.set_result(self._publish(version, tensors))
        return Publication(version, future)

    def _publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Put `version` in place and return its manifest. Blocks for one cast-copy and one hash of all bytes.

        The same version with the same bytes answers its first manifest again. Raises ConflictError for the same version
        with other bytes or an older one, UsageError when names or shapes are not those the publisher was made for.
        """
        latest = self._latest
        if latest is not None and version < latest.version:
            raise ConflictError(f"version {version} is older than {latest.version}, which is published")
        self._check(tensors)
        again = latest is not None and version == latest.version
        # A repeated version goes into the other half: receivers may be reading the first.
        half = self._halves[(version + again) % 2]
        half.fill(tensors)
        hashes = [half.hash(offset, length) for offset, length in self._ranges]
        root = root_digest(hashes)
        if latest is not None and again:
            if root != latest.root_digest:
                raise ConflictError(f"version {version} is published with other bytes", "take one optimizer step first")
            return latest
        self._latest = Manifest(
            run_id=self._run_id,
            version=version,
            layout=self._layout,
            buckets=[
                Bucket(offset=offset, length=length, hash=bucket_hash)
                for (offset, length), bucket_hash in zip(self._ranges, hashes, strict=True)
            ],
            root_digest=root,
            owners=[Owner(total_bytes=self._layout.total_bytes, sources=[self._exporter.export(half.arena)])],
        )
        return self._latest

    def close(self) -> None:
        """Withdraw the arenas. Engines keep what they serve; nothing more can be staged."""
        self._halves.clear()
        self._exporter.close()

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._halves:
            raise UsageError("the publisher is closed", "make a new one")
        if len(tensors) != len(self._layout.tensors):
            raise UsageError(f"{len(tensors)} tensors to publish, {len(self._layout.tensors)} planned", "give them all")
        for entry in self._layout.tensors:
            tensor = tensors.get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise UsageError(f"tensor {entry.name} is {found}, planned was {entry.shape}", "make a new publisher")


class _Half:
    """One of the two arenas, with its tensors as views."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        self.arena = arena
        flat = flat_bytes(arena.view)
        self._views = {entry.name: tensor_at(flat, entry) for entry in layout.tensors}

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, view in self._views.items():
                view.copy_(tensors[name])

    def hash(self, offset: int, length: int) -> str:
        # The training thread waits for this: large buckets are hashed on all cores.
        threads = 1 if length < _PARALLEL_HASH_BYTES else 2
        return hash_bytes(self.arena.view[offset : offset + length], threads=threads)
