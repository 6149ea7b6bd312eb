"""What lies on this rank of a tensor that is spread over ranks, and views of it.

    DTensor [8, 6], Shard(0) on 4 ranks     spans ((2, 4),), ((0, 6),)     local [2, 6]
    _StridedShard(0) alone                  spans ((0, 2), (4, 6)), …      local [4, 6], the rows of both ranges
    a view of it: rows 3 to 8, as [5, 6]    spans ((0, 1),), ((0, 6),)     local [1, 6], a view into the same memory

How placements cut a dimension is torch's own knowledge: they are asked to cut the numbers of its indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from services.wire.errors import UsageError

Ranges = tuple[tuple[int, int], ...]
"""Ascending ranges `start, stop` of indices."""


@dataclass(frozen=True)
class LocalPart:
    """Of a tensor of `shape`: `local` has the indices `spans[d]` along each dimension d; no element where one is empty."""

    shape: torch.Size
    spans: tuple[Ranges, ...]
    local: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


@dataclass(frozen=True)
class Strided:
    """A view into a tensor: shape, stride and first element, in elements of the whole tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class PartView:
    """How a view is had from what lies on a rank: its spans, and the steps from one `local` to the other."""

    shape: torch.Size
    spans: tuple[Ranges, ...]
    index: tuple[int | slice, ...] | None
    """None: nothing of it is here."""
    order: tuple[int, ...]
    new_axes: tuple[int, ...]

    def of(self, local: torch.Tensor) -> LocalPart:
        """A view into `local`, which has the spans that this was planned for."""
        if self.index is None:
            return LocalPart(self.shape, self.spans, local.new_empty((0,) * len(self.shape)))
        view = local[self.index].permute(self.order)
        for axis in self.new_axes:
            view = view.unsqueeze(axis)
        return LocalPart(self.shape, self.spans, view)


def part_of(name: str, tensor: DTensor) -> LocalPart:
    """What of `tensor` lies on this rank; nothing where its mesh has not this rank.

    Raises UsageError for sums that are pending (Partial), or shards that torch cuts otherwise than its placements say.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach()
    if coordinate is None:
        return LocalPart(tensor.shape, ((),) * tensor.ndim, local.new_empty((0,) * max(1, tensor.ndim)))
    for placement in tensor.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise UsageError(f"{name} is placed {placement}, which is no part of it", "shard or replicate weights")
    spans = _spans(tensor.shape, tensor.placements, tuple(tensor.device_mesh.shape), tuple(coordinate))
    sizes = [sum(stop - start for start, stop in ranges) for ranges in spans]
    if list(local.shape) != sizes:
        raise UsageError(
            f"{name} is {list(local.shape)} on this rank, {sizes} were expected",
            "shard it by fully_shard or distribute_tensor",
        )
    return LocalPart(tensor.shape, spans, local)


def plan_view(name: str, shape: torch.Size, spans: tuple[Ranges, ...], view: Strided) -> PartView:
    """What of a view into a whole tensor of `shape` lies on a rank that has `spans` of it.

    Raises UsageError for a view that takes no range of each dimension.
    """
    starts, axes = _axes(name, shape, view)
    index: list[int | slice] = []
    taken: dict[int, Ranges] = {}
    nothing = False
    steps = {source: (axis, step) for axis, (source, step) in enumerate(axes) if source is not None}
    for source, start in enumerate(starts):
        axis, step = steps.get(source, (None, 1))
        found, first, count = _taken(spans[source], start, step, 1 if axis is None else view.shape[axis])
        if step > 1 and len(found) > 1:
            raise UsageError(f"{name} takes one of {step} of several ranges of a rank", "shard another dimension")
        nothing = nothing or not count
        if axis is None:
            index.append(first)
        else:
            index.append(slice(first, first + (count - 1) * step + 1, step))
            taken[axis] = found
    kept = [source for source, _ in axes if source is not None]
    # What is left of the tensor's dimensions is in their order; the view's may be another, with some of size 1.
    order = tuple(sorted(kept).index(source) for source in kept)
    new_axes = tuple(axis for axis, (source, _) in enumerate(axes) if source is None)
    if nothing:
        return PartView(torch.Size(view.shape), ((),) * len(view.shape), None, order, new_axes)
    of_view = tuple(taken.get(axis, ((0, 1),)) for axis in range(len(view.shape)))
    return PartView(torch.Size(view.shape), of_view, tuple(index), order, new_axes)


@cache
def _spans(
    shape: torch.Size, placements: tuple[Placement, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Ranges, ...]:
    indices = [torch.arange(size) for size in shape]
    for place, placement, ranks in zip(coordinate, placements, mesh, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            numbers = _along(indices, placement.dim)
            cut, _ = placement._split_tensor(numbers, ranks, with_padding=False, contiguous=False)
            indices[placement.dim] = cut[place].reshape(-1)
    return tuple(_ranges(one) for one in indices)


def _along(indices: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The numbers of a dimension's indices, in a tensor that has them along that dimension."""
    return indices[dim].view([-1 if each == dim else 1 for each in range(len(indices))])


def _ranges(indices: torch.Tensor) -> Ranges:
    numbers = indices.tolist()
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


def _axes(name: str, shape: torch.Size, view: Strided) -> tuple[list[int], list[tuple[int | None, int]]]:
    """The first index of each of the tensor's dimensions, and of each of the view's: the tensor's dimension and the step
    along it; None for one of size 1.
    """
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts, rest = [], view.offset
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    axes: list[tuple[int | None, int]] = []
    used: set[int] = set()
    for size, stride in zip(view.shape, view.stride, strict=True):
        if size == 1:
            axes.append((None, 1))
            continue
        fitting = [
            source
            for source, each in enumerate(strides)
            if source not in used and stride % each == 0 and stride // each > 0
            if starts[source] + (size - 1) * (stride // each) < shape[source]
        ]
        if not fitting:
            raise UsageError(
                f"{name} {list(view.shape)} takes no range of each dimension of {list(shape)}, which is spread over "
                "ranks",
                "train a model of another family, or on one rank",
            )
        source = max(fitting, key=lambda fit: strides[fit])
        used.add(source)
        axes.append((source, stride // strides[source]))
    return starts, axes


def _taken(spans: Ranges, start: int, step: int, size: int) -> tuple[Ranges, int, int]:
    """Of the indices `start, start + step, …` those in `spans`: as numbers 0 to `size`, the first one's place, how many."""
    found: list[tuple[int, int]] = []
    place, first, count = 0, 0, 0
    for low, high in spans:
        begin, end = max(0, -(-(low - start) // step)), min(size, -(-(high - start) // step))
        if begin < end:
            if not count:
                first = place + start + begin * step - low
            found.append((begin, end))
            count += end - begin
        place += high - low
    return tuple(found), first, count
