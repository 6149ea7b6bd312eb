"""Sharded publishing (FSDP2): which rows of which tensor a rank owns, and where they are in its arena.

    plain tensor            rank 0
    DTensor, Replicate      the rank at coordinate 0 of that mesh dimension
    DTensor, Shard(0)       each rank its own rows, uneven ones included: a contiguous range of the tensor's bytes

No weight is gathered: each rank copies its local rows, and the manifest says where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from services.wire.errors import UsageError
from weight_bus.errors import TransportError
from weight_bus.manifest.computed import PublishedTensor
from weight_bus.manifest.layout import ITEM_BYTES, aligned, place, plan_layout
from weight_bus.manifest.manifest import Layout
from weight_bus.manifest.manifest import Shard as ManifestShard
from weight_bus.manifest.tensors import dtype_of


@dataclass(frozen=True)
class OwnedPiece:
    """This rank's rows of tensor `name`, with `shape`, from byte `offset` of the arena."""

    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class OwnerPlan:
    """`shards` is None for the one owner of everything, whose arena is the whole layout."""

    layout: Layout
    total_bytes: int
    pieces: list[OwnedPiece]
    shards: list[ManifestShard] | None


def plan_owner(tensors: Mapping[str, PublishedTensor], dtype: str, rank: int | None) -> OwnerPlan:
    """What rank `rank` of several owns of `tensors` served in `dtype`; None: there is no other rank.

    Raises UsageError for a DTensor that is placed otherwise than by Replicate and Shard(0), or that nobody shares.
    """
    dtype_of(dtype)
    layout = plan_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    if rank is None:
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise UsageError(f"{name} is spread over ranks, and this publisher is alone", "give it the ranks")
        pieces = [OwnedPiece(entry.name, entry.shape, entry.offset, entry.nbytes) for entry in layout.tensors]
        return OwnerPlan(layout, layout.total_bytes, pieces, None)
    pieces, shards, position = [], [], 0
    for number, entry in enumerate(layout.tensors):
        rows = _owned_rows(entry.name, tensors[entry.name], rank)
        if rows is None:
            continue
        start, shape = rows
        row_bytes = ITEM_BYTES[dtype]
        for size in shape[1:]:
            row_bytes *= size
        nbytes = row_bytes * (shape[0] if shape else 1)
        if not nbytes:
            continue
        offset = place(position, nbytes)
        pieces.append(OwnedPiece(entry.name, shape, offset, nbytes))
        shards.append(ManifestShard(tensor=number, tensor_offset=start * row_bytes, offset=offset, nbytes=nbytes))
        position = offset + nbytes
    return OwnerPlan(layout, aligned(position), pieces, shards)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of `tensor` that lie on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _owned_rows(name: str, tensor: PublishedTensor, rank: int) -> tuple[int, tuple[int, ...]] | None:
    """First row and shape of what this rank owns; None for nothing."""
    if not isinstance(tensor, DTensor):
        return (0, tuple(tensor.shape)) if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    start, rows, mine = 0, tensor.shape[0] if tensor.ndim else 1, True
    for dimension, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            mine = mine and coordinate[dimension] == 0
        elif type(placement) is Shard and placement.dim == 0:
            # As torch.chunk cuts: all of the same size, the last shorter, the rest empty.
            chunk = -(-rows // tensor.device_mesh.size(dimension))
            first = min(rows, coordinate[dimension] * chunk)
            start, rows = start + first, min(rows - first, chunk)
        else:
            raise UsageError(
                f"{name} is placed {placement}, which is no range of its bytes",
                "shard weights by rows, or replicate them",
            )
    local = tuple(tensor.to_local().shape)
    if mine and tensor.ndim and local[0] != rows:
        raise UsageError(f"{name} has {local[0]} rows on this rank, {rows} were expected", "shard it by fully_shard")
    return (start, local) if mine else None


class Ranks:
    """Gloo group of the publishing ranks, to exchange what each of them owns. Made, used and closed by all alike.

    It is the publisher's own: its calls run on background threads and never come between the trainer's collectives.
    Raises UsageError where torch.distributed is not initialised. `wait_s` bounds every exchange.
    """

    def __init__(self, wait_s: float = 60.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError("weights are published by several ranks, and no process group is initialised", "torchrun")
        self._wait_s = wait_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def exchange(self, part: bytes) -> list[bytes]:
        """Everyone's bytes, by rank. Raises TransportError when a rank is gone or does not come within `wait_s`."""
        try:
            return self._exchange(part)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} got no answer from the other publishing ranks within {self._wait_s:g} s ({error})"
            ) from error

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _exchange(self, part: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(part)]), group=self._group)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return [bytes(found[: int(size)].numpy()) for found, size in zip(parts, sizes, strict=True)]
