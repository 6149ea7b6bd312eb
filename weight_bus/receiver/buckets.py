"""Buckets to tensors: which bytes of which tensor are in which bucket; digests.

    bucket   | piece of t0 |pad| piece of t1 … |          Piece: tensor, its offset, the bucket's offset, length
    memory   t0 ▓▓▓▓▓▓▓      t1 ▓▓▓▓▓▓▓▓                  host memory of contiguous tensors is read and written in place

What is not contiguous, or not in host memory, or a slice of a tensor, is written through a copy. Padding is zero by
definition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3

from weight_bus.errors import StageError
from weight_bus.manifest.delta import Words
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
from weight_bus.receiver.slices import Offsets, Slice, read_slice, words_of_slice, write_slice

_ZEROS = bytes(4096)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_KNOWN = 4


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


class RestoredTensors(Mapping[str, torch.Tensor]):
    """Tensors of which the memory has some in another form, to be read as they are published.

    `held`: that memory, under their names and of their shapes and dtypes. `restored`: the names of those that are held
    otherwise; `restore` makes new tensors of one, and of others that come with it. The last are kept until `forget`.
    """

    def __init__(
        self,
        held: Mapping[str, torch.Tensor],
        restored: Collection[str],
        restore: Callable[[str], Mapping[str, torch.Tensor]],
    ) -> None:
        self.held, self.restored = held, restored
        self._restore = restore
        self._last: Mapping[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.restored:
            return self.held[name]
        if name not in self._last:
            # Freed first: two would lie in memory.
            self._last = {}
            self._last = self._restore(name)
        return self._last[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def forget(self) -> None:
        self._last = {}


class Memory:
    """The bytes of a set of tensors, by their number in the layout. Pieces of host memory are views, never copies.

    Tensors that `slices` names are parts of the layout's: of a piece only their bytes are written, or read by `read_into`.
    RestoredTensors are read alone, a tensor at a time.
    """

    def __init__(
        self, layout: Layout, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, Slice] | None = None
    ) -> None:
        self._layout = layout
        self._restored = tensors if isinstance(tensors, RestoredTensors) else None
        held = _held(tensors)
        self._given = [held[entry.name] for entry in layout.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._given]
        self._tensors = [tensor.detach() for tensor in self._given]
        self._slices = [(slices or {}).get(entry.name) for entry in layout.tensors]
        self._host = [
            host_bytes(tensor) if part is None and not self._is_restored(number) else None
            for number, (tensor, part) in enumerate(zip(self._tensors, self._slices, strict=True))
        ]
        self._beside: dict[int, torch.Tensor] = {}
        """Contiguous copies of tensors that are being written."""
        self._copies: dict[int, torch.Tensor] = {}
        """Contiguous copies of tensors that were read."""
        self._share = _share_beside(self._tensors)

    def is_of(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these tensors, where they are now, are what it was made of."""
        held, restored = _held(tensors), tensors if isinstance(tensors, RestoredTensors) else None
        return (
            layout is self._layout
            and restored is self._restored
            and all(
                held.get(entry.name) is given and given.data_ptr() == address
                for entry, given, address in zip(layout.tensors, self._given, self._addresses, strict=True)
            )
        )

    def begin(self) -> None:
        """Forget what was copied for an update that was broken off."""
        self._beside.clear()
        self._copies.clear()
        if self._restored is not None:
            self._restored.forget()

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
        part = bytes_under(self._to_read(piece.tensor))[piece.tensor_offset : piece.tensor_offset + piece.length]
        return part.cpu().numpy().data

    def _to_read(self, number: int) -> torch.Tensor:
        """Contiguous, as it is published."""
        if self._restored is not None and self._is_restored(number):
            return self._restored[self._layout.tensors[number].name].contiguous()
        tensor = self._tensors[number]
        return tensor if tensor.is_contiguous() else self._copies.setdefault(number, tensor.contiguous())

    def _is_restored(self, number: int) -> bool:
        return self._restored is not None and self._layout.tensors[number].name in self._restored.restored

    @torch.inference_mode()
    def read_into(self, piece: Piece, out: memoryview) -> None:
        """Copy the piece's bytes to their places in `out`: of a slice those that are here, the others stay."""
        part = self._slices[piece.tensor]
        if part is None:
            copy_bytes(self.read(piece), out)
            return
        read_slice(self._to_read(piece.tensor), part, piece.tensor_offset, out)

    @torch.inference_mode()
    def put_words(self, number: int, offsets: Offsets, values: Words) -> None:
        """Put words at these bytes of tensor `number`, as the layout has it; those that are not in a slice are left out.

        `offsets` are multiples of a word's size. What is not contiguous is seen by others after `finish`.
        """
        tensor, part = self._tensors[number], self._slices[number]
        if not tensor.is_contiguous():
            tensor = self._beside.setdefault(number, tensor.contiguous())
        if part is not None:
            offsets, values = words_of_slice(tensor, part, offsets, values)
        if not len(offsets):
            return
        size = values.dtype.itemsize
        words = bytes_under(tensor).view(_WORDS[size])
        places = torch.from_numpy(offsets // size).to(words.device)
        words.index_copy_(0, places, torch.from_numpy(values.view(f"i{size}")).view(_WORDS[size]).to(words.device))

    def held_by_slice(self, number: int) -> bool:
        """Whether only a part of tensor `number` is here."""
        return self._slices[number] is not None

    @torch.inference_mode()
    def finish(self) -> None:
        """Copy what was written beside tensors that are not contiguous into them."""
        for number, whole in self._beside.items():
            self._tensors[number].copy_(whole)
        self.begin()

    @torch.inference_mode()
    def copy_from(self, other: Memory, rest: Callable[[], None], *, at_once: int = 4 << 20) -> None:
        """Take over all bytes of a set of the same layout; `rest` is called between pieces."""
        for number, (mine, theirs, tensor) in enumerate(zip(self._host, other._host, self._tensors, strict=True)):
            source = other._tensors[number]
            if theirs is None and other._is_restored(number):
                source = other._to_read(number)
                theirs = host_bytes(source)
            if mine is None or theirs is None:
                tensor.copy_(source)
                continue
            for start in range(0, len(mine), at_once):
                copy_bytes(theirs[start : start + at_once], mine[start : start + at_once])
                rest()
        other.begin()


class Memories:
    """The `Memory` of each set of tensors, kept from update to update: an engine has two, which take turns, each of them as
    it is written and, where it is held otherwise, as it is read.

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
        self._known = [*self._known[1 - _KNOWN :], fresh]
        return fresh


def _held(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """For names, shapes, dtypes and addresses, which need nothing restored."""
    return tensors.held if isinstance(tensors, RestoredTensors) else tensors


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
    held = _held(live).items()
    layout = plan_mixed_layout({name: (tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in held})
    return BucketPlan.of(layout, [None], plan_buckets(layout.total_bytes, DEFAULT_BUCKET_BYTES))


def _ranges(manifest: Manifest) -> list[tuple[int, int]]:
    return [(bucket.offset, bucket.length) for bucket in manifest.buckets]


def _pad(digest: blake3, length: int) -> None:
    while length > 0:
        digest.update(_ZEROS[:length])
        length -= len(_ZEROS)


def digest_of(plan: BucketPlan, tensors: Mapping[str, torch.Tensor]) -> str:
    """Root digest of what lies in `tensors`, in the buckets of `plan`."""
    memory = Memory(plan.layout, tensors)
    throttle = memory.throttle()
    hashes = []
    for (_, length), pieces in zip(plan.ranges, plan.pieces, strict=True):
        hashes.append(bucket_hash(pieces, length, memory))
        throttle.rest()
    memory.begin()
    return root_digest(hashes)


def own_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of tensors in their own layout, whatever manifest they came from."""
    return digest_of(default_plan(tensors), tensors)


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
