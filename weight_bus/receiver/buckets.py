"""Buckets to tensors: which bytes of which tensor are in which bucket; slices of tensor parallel ranks; digests.

    bucket   | piece of t0 |pad| piece of t1 … |          Piece: tensor, its offset, the bucket's offset, length
    memory   t0 ▓▓▓▓▓▓▓      t1 ▓▓▓▓▓▓▓▓                  host memory of contiguous tensors is read and written in place

What is not contiguous, or not in host memory, or a slice of a tensor, is written through a copy. Padding is zero by
definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from blake3 import blake3

from weight_bus.errors import StageError
from weight_bus.manifest.layout import (
    DEFAULT_BUCKET_BYTES,
    Piece,
    bucket_pieces,
    plan_buckets,
    plan_mixed_layout,
    root_digest,
)
from weight_bus.manifest.manifest import Layout, Manifest, Shard
from weight_bus.manifest.shard_map import ShardMap
from weight_bus.manifest.tensors import bytes_under, dtype_name, flat_bytes, host_bytes
from weight_bus.memory.arena import copy_bytes
from weight_bus.memory.throttle import BESIDE_DECODING, CpuThrottle

_ZEROS = bytes(4096)


@dataclass(frozen=True)
class BucketPlan:
    """The layout cut into buckets, and the tensor pieces of each: the same from version to version.

    `ranges`: `(offset, length)` of each bucket; `shards` says what lies in each owner's arena (None: the layout), `maps`
    which of its bytes those are.
    """

    layout: Layout
    shards: list[list[Shard] | None]
    ranges: list[tuple[int, int]]
    pieces: list[list[Piece]]
    maps: list[ShardMap]

    @classmethod
    def of(cls, layout: Layout, shards: list[list[Shard] | None], ranges: list[tuple[int, int]]) -> BucketPlan:
        pieces = [bucket_pieces(layout, offset, length) for offset, length in ranges]
        return cls(layout, shards, ranges, pieces, [ShardMap(layout, own) for own in shards])

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> BucketPlan:
        return cls.of(manifest.layout, [owner.shards for owner in manifest.owners], _ranges(manifest))

    def fits(self, manifest: Manifest) -> bool:
        return (
            manifest.layout == self.layout
            and self.ranges == _ranges(manifest)
            and self.shards == [owner.shards for owner in manifest.owners]
        )


class Memory:
    """The bytes of a set of tensors, by their number in the layout. Pieces of host memory are views, never copies.

    Tensors that `slices` names are parts of the layout's: they can only be written.
    """

    def __init__(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, Slice] | None = None
    ) -> None:
        self._layout = layout
        self._given = [tensors[entry.name] for entry in layout.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._given]
        self._tensors = [tensor.detach() for tensor in self._given]
        self._slices = [(slices or {}).get(entry.name) for entry in layout.tensors]
        self._host = [
            host_bytes(tensor) if part is None else None
            for tensor, part in zip(self._tensors, self._slices, strict=True)
        ]
        self._beside: dict[int, torch.Tensor] = {}
        """Contiguous copies of tensors that are being written."""
        self._copies: dict[int, torch.Tensor] = {}
        """Contiguous copies of tensors that were read."""
        self._share = _share_beside(self._tensors)

    def is_of(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these tensors, where they are now, are what it was made of."""
        return layout is self._layout and all(
            tensors.get(entry.name) is given and given.data_ptr() == address
            for entry, given, address in zip(layout.tensors, self._given, self._addresses, strict=True)
        )

    def begin(self) -> None:
        """Forget what was copied for an update that was broken off."""
        self._beside.clear()
        self._copies.clear()

    def throttle(self) -> CpuThrottle:
        """For work on these bytes."""
        return CpuThrottle(self._share)

    def in_place(self, piece: Piece) -> memoryview | None:
        """The piece's own memory; None where it is not contiguous host memory."""
        host = self._host[piece.tensor]
        return None if host is None else host[piece.tensor_offset : piece.tensor_offset + piece.length]

    def write(self, piece: Piece, data: memoryview) -> None:
        """Put `data` in the piece's place; what is not contiguous is seen by others after `finish`."""
        host = self.in_place(piece)
        if host is not None:
            copy_bytes(data, host)
        else:
            self._write_by_torch(piece, data)

    @torch.inference_mode()
    def _write_by_torch(self, piece: Piece, data: memoryview) -> None:
        tensor = self._tensors[piece.tensor]
        if not tensor.is_contiguous():
            tensor = self._beside.setdefault(piece.tensor, tensor.contiguous())
        part = self._slices[piece.tensor]
        if part is not None:
            write_slice(tensor, part, piece.tensor_offset, data)
            return
        bytes_under(tensor)[piece.tensor_offset : piece.tensor_offset + piece.length].copy_(flat_bytes(data))

    @torch.inference_mode()
    def read(self, piece: Piece) -> memoryview:
        """The piece's bytes: its own memory where that can be, else a copy. Raises ValueError for one of a slice."""
        if self._slices[piece.tensor] is not None:
            raise ValueError(f"tensor {piece.tensor} is a slice: not all of its bytes are here")
        host = self.in_place(piece)
        if host is not None:
            return host
        tensor = self._tensors[piece.tensor]
        if not tensor.is_contiguous():
            tensor = self._copies.setdefault(piece.tensor, tensor.contiguous())
        part = bytes_under(tensor)[piece.tensor_offset : piece.tensor_offset + piece.length]
        return part.cpu().numpy().data

    @torch.inference_mode()
    def finish(self) -> None:
        """Copy what was written beside tensors that are not contiguous into them."""
        for number, whole in self._beside.items():
            self._tensors[number].copy_(whole)
        self.begin()

    @torch.inference_mode()
    def copy_from(self, other: Memory, rest: Callable[[], None], *, at_once: int = 4 << 20) -> None:
        """Take over all bytes of a set of the same layout; `rest` is called between pieces."""
        pairs = zip(self._host, other._host, self._tensors, other._tensors, strict=True)
        for mine, theirs, tensor, source in pairs:
            if mine is None or theirs is None:
                tensor.copy_(source)
                continue
            for start in range(0, len(mine), at_once):
                copy_bytes(theirs[start : start + at_once], mine[start : start + at_once])
                rest()


class Memories:
    """The `Memory` of each set of tensors, kept from update to update: an engine has two, which take turns.

    To look at a tensor through torch gives the interpreter's lock away, and beside threads that decode each time takes up
    to half a millisecond. A small model's update took ten times as long as its work does.
    """

    def __init__(self, slices: Mapping[str, Slice] | None = None) -> None:
        self._slices = slices
        self._known: list[Memory] = []

    def of(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Memory:
        """Ready for an update. For one thread at a time."""
        for memory in self._known:
            if memory.is_of(layout, tensors):
                memory.begin()
                return memory
        fresh = Memory(layout, tensors, self._slices)
        self._known = [*self._known[-1:], fresh]
        return fresh


def bucket_hash(pieces: list[Piece], length: int, memory: Memory) -> str:
    """blake3 of a bucket whose pieces lie in `memory`, padding taken as zeros; hexadecimal."""
    digest = blake3()
    position = 0
    for piece in pieces:
        _pad(digest, piece.bucket_offset - position)
        digest.update(memory.read(piece))
        position = piece.bucket_offset + piece.length
    _pad(digest, length - position)
    return str(digest.hexdigest())


def default_plan(live: Mapping[str, torch.Tensor]) -> BucketPlan:
    """The plan of weights that came without a manifest: in the order given, buckets of default size."""
    layout = plan_mixed_layout({name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in live.items()})
    return BucketPlan.of(layout, [None], plan_buckets(layout.total_bytes, DEFAULT_BUCKET_BYTES))


def _ranges(manifest: Manifest) -> list[tuple[int, int]]:
    return [(bucket.offset, bucket.length) for bucket in manifest.buckets]


def _pad(digest: blake3, length: int) -> None:
    while length > 0:
        digest.update(_ZEROS[:length])
        length -= len(_ZEROS)


@dataclass(frozen=True)
class Slice:
    """A tensor parallel rank's part of a tensor: `shape` is of the whole, the rank's part begins at `start` along `dim`.

        dim 0   ┌───────────┐          dim 1   ┌───┬───┬───┐
                ├───────────┤ start            │   │ ▓ │   │
                │▓▓▓▓▓▓▓▓▓▓▓│                  │   │ ▓ │   │    both: columns `begin` to `end` of every row
                └───────────┘                  └───┴───┴───┘    (of one row only, where dim is 0)

    Ranks read whole buckets, because hashes are of whole buckets, and keep their part.
    """

    shape: tuple[int, ...]
    dim: int
    start: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be the slice."""
        others = [size for dim, size in enumerate(shape) if dim != self.dim]
        return (
            len(shape) == len(self.shape)
            and others == [size for dim, size in enumerate(self.shape) if dim != self.dim]
            and self.start + shape[self.dim] <= self.shape[self.dim]
        )


def write_slice(tensor: torch.Tensor, part: Slice, offset: int, data: memoryview) -> None:
    """Copy the bytes of `data` that belong to the slice into `tensor`, which is contiguous.

    `data`: bytes of the whole tensor, from `offset` on.
    """
    across = tensor.element_size() * prod(part.shape[part.dim + 1 :])
    row, width = across * part.shape[part.dim], across * tensor.shape[part.dim]
    begin = part.start * across
    if not data or not width:
        return
    target, source = bytes_under(tensor).view(-1, width), flat_bytes(data)
    done = 0
    while done < len(data):
        number, column = divmod(offset + done, row)
        rows = (len(data) - done) // row if column == 0 else 0
        if rows:
            found = source[done : done + rows * row].view(rows, row)
            target[number : number + rows].copy_(found[:, begin : begin + width])
            done += rows * row
            continue
        length = min(row - column, len(data) - done)
        first, last = max(column, begin), min(column + length, begin + width)
        if first < last:
            at = done + first - column
            target[number, first - begin : last - begin].copy_(source[at : at + last - first])
        done += length


def digest_of(plan: BucketPlan, tensors: Mapping[str, torch.Tensor]) -> str:
    """Root digest of what lies in `tensors`, in the buckets of `plan`."""
    memory = Memory(plan.layout, tensors)
    throttle = memory.throttle()
    hashes = []
    for (_, length), pieces in zip(plan.ranges, plan.pieces, strict=True):
        hashes.append(bucket_hash(pieces, length, memory))
        throttle.rest()
    return root_digest(hashes)


def throttle_beside(weights: Iterable[torch.Tensor]) -> CpuThrottle:
    """The CPU throttle for work beside decoding from such weights; none for a GPU, which has memory of its own."""
    return CpuThrottle(_share_beside(weights))


def _share_beside(weights: Iterable[torch.Tensor]) -> float:
    # Pinned memory is a device's shadow: that decodes from its own.
    beside = all(tensor.device.type == "cpu" and not tensor.is_pinned() for tensor in weights)
    return BESIDE_DECODING if beside else 1.0


def check_fits(layout: Layout, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]) -> None:
    """Raise StageError, naming what differs, unless the layout is that of these tensors by names, shapes and dtypes.

    Of those that `slices` names only that part is here.
    """
    offered = {entry.name: entry for entry in layout.tensors}
    missing, unknown = sorted(tensors.keys() - offered.keys()), sorted(offered.keys() - tensors.keys())
    if missing or unknown:
        raise StageError(
            f"the manifest lacks {_some(missing)} and names {_some(unknown)} that this engine does not know",
            "publish the model that the engine serves",
        )
    for name, entry in offered.items():
        shape = slices[name].shape if name in slices else tuple(tensors[name].shape)
        dtype = dtype_name(tensors[name].dtype)
        if (shape, dtype) != (entry.shape, entry.dtype):
            raise StageError(f"{name} is {dtype}{list(shape)} here, {entry.dtype}{list(entry.shape)} in the manifest")
    planned = plan_mixed_layout({entry.name: (entry.shape, entry.dtype) for entry in layout.tensors})
    if planned != layout:
        raise StageError("the manifest's offsets are not those its names, shapes and dtypes give")


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
