"""Sharded publishing: which part of which tensor a rank owns, and where it is in its arena.

    plain tensor                            rank 0
    DTensor, Replicate                      one of the ranks that hold the same part, so that all own alike much
    DTensor, Shard(n), _StridedShard(n)     each rank its own part, uneven ones included, on meshes of any dimension

A part is contiguous in the arena, whatever it is in the tensor: the manifest says it as runs with a stride, so that
receivers read few large ranges and put the runs in their places. No weight is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import msgspec
import torch
from torch.distributed.tensor import DTensor

from services.wire.errors import ConflictError, UsageError
from weight_bus.manifest.computed import ComputedTensor, PublishedTensor
from weight_bus.manifest.layout import ITEM_BYTES, aligned, place, plan_layout
from weight_bus.manifest.local_part import LocalPart, Ranges, part_of
from weight_bus.manifest.manifest import Layout, Shard
from weight_bus.manifest.tensors import dtype_of
from weight_bus.publisher.ranks import Ranks


@dataclass(frozen=True)
class OwnedPiece:
    """A block of this rank's part of tensor `name`, from `start` along each dimension, with `shape`, from byte `offset`
    of the arena.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The block of what lies on this rank, a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.shape, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, start, size)
        return local


@dataclass(frozen=True)
class OwnerPlan:
    """What this rank owns, and what all do: `owners` has the shards of each; None for one that is alone, whose arena is
    the whole layout.
    """

    layout: Layout
    total_bytes: int
    pieces: list[OwnedPiece]
    owners: list[list[Shard]] | None
    totals: list[int]
    """Bytes of the arenas, by owner."""


class _Held(msgspec.Struct, frozen=True):
    """What a rank holds of each tensor, as shards whose arena offsets count from the tensor's first."""

    layout_digest: str
    tensors: list[list[Shard]]


def plan_owner(tensors: Mapping[str, PublishedTensor], dtype: str, ranks: Ranks | None) -> OwnerPlan:
    """What this rank owns of `tensors` served in `dtype`; None: there is no other rank. All ranks call it alike.

    Raises UsageError for a DTensor with pending sums, or that nobody shares, ConflictError where another rank has other
    tensors, TransportError where one does not answer.
    """
    dtype_of(dtype)
    layout = plan_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
    if ranks is None:
        for name, tensor in tensors.items():
            if _is_spread(tensor):
                raise UsageError(f"{name} is spread over ranks, and this publisher is alone", "give it the ranks")
        pieces = [
            OwnedPiece(entry.name, (0,) * len(entry.shape), entry.shape, entry.offset, entry.nbytes)
            for entry in layout.tensors
        ]
        return OwnerPlan(layout, layout.total_bytes, pieces, None, [layout.total_bytes])
    item = ITEM_BYTES[dtype]
    blocks = [list(_blocks(_spans(entry.name, tensors[entry.name], ranks.rank))) for entry in layout.tensors]
    held = [
        [shard for block in own for shard in _shards(number, entry.shape, block, item)]
        for number, (entry, own) in enumerate(zip(layout.tensors, blocks, strict=True))
    ]
    encoded = msgspec.msgpack.encode(_Held(layout.digest, [_in_a_row(shards) for shards in held]))
    everyone = [msgspec.msgpack.decode(part, type=_Held) for part in ranks.exchange(encoded)]
    for number, other in enumerate(everyone):
        if other.layout_digest != layout.digest:
            raise ConflictError(
                f"rank {number} publishes layout {other.layout_digest[:16]}…, rank {ranks.rank} {layout.digest[:16]}…",
                "give every rank the same names, shapes and dtype, in the same order",
            )
    owners, totals, begins = _assigned(layout, [each.tensors for each in everyone])
    own: list[OwnedPiece] = []
    for number, entry in enumerate(layout.tensors):
        position = begins[ranks.rank].get(number)
        for block in blocks[number] if position is not None else ():
            assert position is not None
            shape = tuple(stop - start for start, stop, _ in block)
            nbytes = prod(shape) * item
            own.append(OwnedPiece(entry.name, tuple(local for _, _, local in block), shape, position, nbytes))
            position += nbytes
    return OwnerPlan(layout, totals[ranks.rank], own, owners, totals)


def local_part(tensor: torch.Tensor | LocalPart) -> torch.Tensor:
    """What of `tensor` lies on this rank."""
    if isinstance(tensor, LocalPart):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _assigned(
    layout: Layout, held: list[list[list[Shard]]]
) -> tuple[list[list[Shard]], list[int], list[dict[int, int]]]:
    """The shards and the bytes of each rank's arena, and where each tensor's part begins in it.

    What several hold goes to who owns the fewest bytes so far, large parts first: `held` is by rank and tensor. Every rank
    comes to the same.
    """
    owners: list[list[Shard]] = [[] for _ in held]
    ends, begins = [0] * len(held), [dict[int, int]() for _ in held]
    for tensor, shards, rank in sorted(_owned(layout, held), key=lambda owned: owned[0]):
        nbytes = sum(shard.nbytes for shard in shards)
        begin = begins[rank][tensor] = place(ends[rank], nbytes)
        owners[rank] += [msgspec.structs.replace(shard, offset=begin + shard.offset) for shard in shards]
        ends[rank] = begin + nbytes
    return owners, [aligned(end) for end in ends], begins


def _owned(layout: Layout, held: list[list[list[Shard]]]) -> Iterator[tuple[int, tuple[Shard, ...], int]]:
    """Each part of each tensor, and the rank that owns it."""
    holders: dict[tuple[int, tuple[Shard, ...]], list[int]] = {}
    for tensor in range(len(layout.tensors)):
        for rank, of_rank in enumerate(held):
            if of_rank[tensor]:
                holders.setdefault((tensor, tuple(of_rank[tensor])), []).append(rank)
    sizes = {part: sum(shard.nbytes for shard in part[1]) for part in holders}
    owned = [0] * len(held)
    # What one rank alone holds is that rank's, whatever it is: it counts before there is a choice.
    for part in sorted(holders, key=lambda each: (len(holders[each]) > 1, -sizes[each], each[0])):
        rank = min(holders[part], key=lambda each: owned[each])
        owned[rank] += sizes[part]
        yield *part, rank


def _in_a_row(shards: list[Shard]) -> list[Shard]:
    placed, position = [], 0
    for shard in shards:
        placed.append(msgspec.structs.replace(shard, offset=position))
        position += shard.nbytes
    return placed


def _is_spread(tensor: PublishedTensor) -> bool:
    if isinstance(tensor, ComputedTensor):
        return tensor.placed_as is not None
    return isinstance(tensor, DTensor | LocalPart)


def _spans(name: str, tensor: PublishedTensor, rank: int) -> tuple[Ranges, ...] | None:
    """The indices that this rank holds along each dimension; None for nothing."""
    if isinstance(tensor, ComputedTensor) and tensor.placed_as is not None:
        tensor = tensor.placed_as
    if isinstance(tensor, DTensor):
        tensor = part_of(name, tensor)
    if isinstance(tensor, LocalPart):
        return tensor.spans if tensor.local.numel() else None
    if rank or not prod(tensor.shape):
        return None
    return tuple(((0, size),) for size in tensor.shape)


_Block = tuple[tuple[int, int, int], ...]
"""Along each dimension: first index, the one after the last, and where the first lies on this rank."""


def _blocks(spans: tuple[Ranges, ...] | None) -> Iterator[_Block]:
    """The parts that have one range along each dimension: one, unless shards are interleaved."""
    if spans is None:
        return
    located = []
    for ranges in spans:
        begins, position = [], 0
        for start, stop in ranges:
            begins.append((start, stop, position))
            position += stop - start
        located.append(begins)
    yield from product(*located)


def _shards(tensor: int, shape: tuple[int, ...], block: _Block, item: int) -> Iterator[Shard]:
    """A block as few shards, in the order of its elements. Offsets in the arena are still to be given.

    Runs are along the last dimension of which only a part is here, and repeat along the one before: further dimensions
    of which only a part is here take a shard for each index.
    """
    cut = [dim for dim, (start, stop, _) in enumerate(block) if stop - start != shape[dim]]
    inner = cut[-1] if cut else 0
    outer = cut[-2] if len(cut) > 1 else 0
    sizes = [prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    first = block[inner] if block else (0, 1, 0)
    # Without a dimension that is cut, or with the first one alone, all is one run.
    run = (first[1] - first[0]) * (sizes[inner] if block else item)
    stride = shape[inner] * sizes[inner] if block else run
    offset = first[0] * (sizes[inner] if block else 0)
    repeats = prod(stop - start for start, stop, _ in block[outer:inner])
    offset += sum(block[dim][0] * sizes[dim] for dim in range(outer, inner))
    for index in product(*(range(start, stop) for start, stop, _ in block[:outer])):
        at = offset + sum(number * size for number, size in zip(index, sizes[:outer], strict=True))
        whole = len(cut) < 2 and inner == 0
        yield Shard(
            tensor=tensor,
            tensor_offset=at,
            offset=0,
            nbytes=run * repeats,
            run=0 if whole else run,
            stride=0 if whole else stride,
        )
