"""Between the buckets of an arena and the tensors of a model: writing buckets into tensors, reading them back out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weight_bus.layout import Piece, bucket_pieces, plan_buckets, plan_mixed_layout
from weight_bus.manifest import Layout, Manifest
from weight_bus.views import bytes_under, dtype_name

DEFAULT_BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class BucketPlan:
    """A layout cut into buckets, and the tensor pieces of each: the same from version to version."""

    layout: Layout
    ranges: list[tuple[int, int]]
    pieces: list[list[Piece]]

    @classmethod
    def of(cls, layout: Layout, ranges: list[tuple[int, int]]) -> BucketPlan:
        return cls(layout, ranges, [bucket_pieces(layout, offset, length) for offset, length in ranges])

    @property
    def largest(self) -> int:
        return max(length for _, length in self.ranges)

    def fits(self, manifest: Manifest) -> bool:
        return manifest.layout == self.layout and self.ranges == [(b.offset, b.length) for b in manifest.buckets]


class Scatter:
    """Writes buckets into tensors. One that is not contiguous is put together beside it and copied at the end."""

    def __init__(self, layout: Layout, shadow: Mapping[str, torch.Tensor]) -> None:
        self._strided: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = []
        for entry in layout.tensors:
            tensor = shadow[entry.name]
            if not tensor.is_contiguous():
                whole = torch.empty(entry.shape, dtype=tensor.dtype)
                self._strided.append((tensor, whole))
                tensor = whole
            self._bytes.append(bytes_under(tensor))

    @torch.inference_mode()
    def write(self, pieces: list[Piece], bucket: torch.Tensor) -> None:
        for piece in pieces:
            into = self._bytes[piece.tensor]
            if piece.length != into.numel():
                into = into[piece.tensor_offset : piece.tensor_offset + piece.length]
            into.copy_(bucket[piece.bucket_offset : piece.bucket_offset + piece.length])

    @torch.inference_mode()
    def finish(self) -> None:
        for tensor, whole in self._strided:
            tensor.copy_(whole)


class Gather:
    """Reads buckets back out of tensors, padding zeroed."""

    def __init__(self, layout: Layout, live: Mapping[str, torch.Tensor]) -> None:
        self._bytes = [bytes_under(live[entry.name].detach().contiguous()) for entry in layout.tensors]

    def read(self, pieces: list[Piece], bucket: torch.Tensor) -> None:
        bucket.zero_()
        for piece in pieces:
            found = self._bytes[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.length]
            bucket[piece.bucket_offset : piece.bucket_offset + piece.length].copy_(found)


def default_plan(live: Mapping[str, torch.Tensor]) -> BucketPlan:
    """The plan of weights that came without a manifest: in the order given, buckets of default size."""
    layout = plan_mixed_layout({name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in live.items()})
    return BucketPlan.of(layout, plan_buckets(layout.total_bytes, DEFAULT_BUCKET_BYTES))
