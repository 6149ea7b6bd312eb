"""One of the publisher's arena buffers, and the copy of a version's weights into it.

    weights contiguous, in the arena's layout      one memcpy        `weight_bus.publisher.contiguous`
    not contiguous, in the serving dtype           a memcpy each, the small ones together
    of another dtype or device                     torch's copy of all of them, which casts; also with several threads
    computed                                       one after the other, each given up before the next is computed

Where the exporter has a device, the arena lies there, and what is on that device is copied within it.

All give the same bytes: padding stays zero, whatever lies between the weights in the source.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from weight_bus.manifest.computed import ComputedTensor, PublishedTensor
from weight_bus.manifest.tensors import flat_bytes
from weight_bus.memory.arena import Arena, copy_memory, populate, streams_well
from weight_bus.memory.device import DeviceArena
from weight_bus.publisher.sharding import OwnedPiece, OwnerPlan, local_part
from weight_bus.transports.base import DeviceExporter, Exporter


class ArenaBuffer:
    """This rank's part of a version, as views into the arena. A rank that owns nothing has no arena."""

    def __init__(self, exporter: Exporter, plan: OwnerPlan, dtype: torch.dtype) -> None:
        """Raises TransportError when there is no memory for it."""
        self.arena: Arena | None = _allocate(exporter, plan.total_bytes) if plan.total_bytes else None
        self._bounce: memoryview | None = None
        self._dtype = dtype
        self._pieces = plan.pieces
        self._names = [entry.name for entry in plan.layout.tensors]
        self._views: dict[str, list[tuple[OwnedPiece, torch.Tensor]]] = {}
        if self.arena is not None:
            flat = _flat(self.arena)
            for piece in plan.pieces:
                part = flat[piece.offset : piece.offset + piece.nbytes]
                view = part.view(dtype).view(piece.shape)
                self._views.setdefault(piece.name, []).append((piece, view))
        ends = [(piece.offset + piece.nbytes, after.offset) for piece, after in pairwise(plan.pieces)]
        self._padding = [(end, begin - end) for end, begin in ends if begin > end]

    @property
    def nbytes(self) -> int:
        return 0 if self.arena is None else self.arena.nbytes

    def host(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        """`Arena.host`: bytes of it, where they can be hashed."""
        return memoryview(b"") if self.arena is None else self.arena.host(start, stop, into)

    def bucket(self, offset: int, length: int) -> memoryview:
        """Likewise, until the next call. Of a device's arena a copy in memory that is kept for it."""
        if self.arena is not None and (self._bounce is None or len(self._bounce) < length):
            self._bounce = self.arena.host_buffer(length)
        return self.host(offset, offset + length, self._bounce)

    def fill(self, tensors: Mapping[str, PublishedTensor]) -> None:
        """Copy the pieces in; they are there when it returns. The interpreter lock is released while bytes move."""
        self._fill(tensors)
        if self.arena is not None:
            self.arena.settle()

    def _fill(self, tensors: Mapping[str, PublishedTensor]) -> None:
        views, parts = [], []
        for name in self._names:
            tensor, held = tensors[name], self._views.get(name, [])
            if isinstance(tensor, ComputedTensor):
                self._compute(tensor, held)
            elif held:
                local = local_part(tensor)
                for piece, view in held:
                    views.append(view)
                    parts.append(piece.of(local))
        if self.arena is None or not parts:
            return
        if len(parts) == len(self._pieces) and self._same_layout(parts):
            self._copy_whole(self.arena, parts)
            return
        several = torch.get_num_threads() > 1
        left = [pair for pair in zip(views, parts, strict=True) if several or not self._copied(pair[0], pair[1])]
        if left:
            with torch.no_grad():
                # One call for all: with thousands of small tensors Python would take as long as the copies.
                torch._foreach_copy_([view for view, _ in left], [part for _, part in left])

    @torch.no_grad()
    def _compute(self, tensor: ComputedTensor, held: list[tuple[OwnedPiece, torch.Tensor]]) -> None:
        """One that is spread over ranks is computed by all of them, also where nothing of it is published."""
        if held or tensor.placed_as is not None:
            local = local_part(tensor.compute())
            for piece, view in held:
                view.copy_(piece.of(local))

    def _same_layout(self, parts: Sequence[torch.Tensor]) -> bool:
        """Whether the pieces are in one storage, at the same distances as in the arena."""
        storage = parts[0].untyped_storage().data_ptr()
        origin = parts[0].data_ptr() - self._pieces[0].offset
        return all(
            part.data_ptr() == origin + piece.offset
            and self._is_served(part)
            and part.untyped_storage().data_ptr() == storage
            for piece, part in zip(self._pieces, parts, strict=True)
        )

    def _copy_whole(self, arena: Arena, parts: Sequence[torch.Tensor]) -> None:
        first, last = self._pieces[0], self._pieces[-1]
        base = arena.address
        copy_memory(parts[0].data_ptr(), base + first.offset, last.offset + last.nbytes - first.offset)
        for offset, nbytes in self._padding:
            ctypes.memset(base + offset, 0, nbytes)

    def _copied(self, view: torch.Tensor, part: torch.Tensor) -> bool:
        """Copy a large piece by memcpy, if its bytes are what is served and that is faster; whether it was."""
        source, target = part.data_ptr(), view.data_ptr()
        if not self._is_served(part) or not streams_well(part.nbytes, source, target):
            return False
        copy_memory(source, target, part.nbytes)
        return True

    def _is_served(self, part: torch.Tensor) -> bool:
        return part.dtype == self._dtype and part.device.type == "cpu" and part.is_contiguous()


def _allocate(exporter: Exporter, nbytes: int) -> Arena:
    if isinstance(exporter, DeviceExporter) and exporter.device is not None:
        return exporter.allocate_on_device(nbytes)
    return exporter.allocate(nbytes)


def _flat(arena: Arena) -> torch.Tensor:
    """uint8 `[nbytes]` over the arena, none of whose pages is touched for the first time by a version."""
    if isinstance(arena, DeviceArena):
        return arena.flat
    populate(arena)
    return flat_bytes(arena.view)
