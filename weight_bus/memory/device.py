"""Memory of a GPU, as arenas and as what is read into: registered with NIXL as it is, its bytes copied to the host where
they are hashed.

    publisher   weights ── copy on the device ──► arena (VRAM)          each bucket ── copy ──► pinned ──► blake3
    receiver    arena ── NIXL READ ──► 64 MiB of its own (VRAM)         ── copy ──► host ──► blake3 ──► the shadow

`DeviceMemory` is what differs between a GPU's memory and another: tests give the host's by the same interface.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from services.wire.weights_api import MemoryKind
from weight_bus.errors import TransportError
from weight_bus.memory.arena import Arena


class DeviceMemory(Protocol):
    """One device's memory. `number`: of the device in this process, as NIXL is told it.

    For one thread at a time, but for `allocate` and `settle`.
    """

    kind: MemoryKind
    number: int

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]` of zeros. Raises TransportError where the device has not that much."""
        ...

    def host_buffer(self, nbytes: int) -> memoryview:
        """Memory of the host that `to_host` copies to fastest."""
        ...

    def to_host(self, source: torch.Tensor, out: memoryview) -> None:
        """Copy uint8 `[n]` of the device to `n` bytes of the host; they are there when it returns."""
        ...

    def settle(self) -> None:
        """Wait for what this thread asked of the device."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Within it, the device is the calling thread's: libraries register and copy its memory by the thread's context."""
        ...


class CudaMemory:
    """Of a GPU that CUDA numbers so in this process. Copies to the host have a stream of their own: they wait for nothing
    that trains or decodes.
    """

    kind: MemoryKind = "VRAM"

    def __init__(self, number: int) -> None:
        self.number = number
        self._device = torch.device("cuda", number)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise TransportError(
                f"GPU {self.number} has no {nbytes} bytes left for weights on the wire ({free} of {total} are free)",
                "set weights.nixl.memory=host",
            ) from error
        self.settle()
        return memory

    def host_buffer(self, nbytes: int) -> memoryview:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data

    def to_host(self, source: torch.Tensor, out: memoryview) -> None:
        with torch.cuda.stream(self._stream):
            torch.frombuffer(out, dtype=torch.uint8).copy_(source, non_blocking=True)
            self._stream.synchronize()

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)


class DeviceArena(Arena):
    """An arena that no pointer of the host leads to. `view` is empty; `flat` is the device's uint8 `[nbytes]`."""

    on_device = True

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        """Raises TransportError as `DeviceMemory.allocate` does."""
        self.path = None
        self.view = memoryview(b"")
        self.nbytes = nbytes
        self.memory = memory
        self.flat = memory.allocate(nbytes)

    @property
    def address(self) -> int:
        return self.flat.data_ptr()

    def host(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:
        out = self.memory.host_buffer(stop - start) if into is None else into[: stop - start]
        if stop > start:
            self.memory.to_host(self.flat[start:stop], out)
        return out

    def host_buffer(self, nbytes: int) -> memoryview:
        return self.memory.host_buffer(nbytes)

    def settle(self) -> None:
        self.memory.settle()

    def close(self) -> None:
        """The memory goes back with the last tensor that refers to it."""
        self.flat = self.flat[:0].clone()
