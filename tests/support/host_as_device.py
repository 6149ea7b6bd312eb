"""The host's memory in the place of a GPU's: the way of weights over a device, where there is none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from services.wire.weights_api import MemoryKind


class HostAsDevice:
    """A `DeviceMemory`. `kind`, `number`: what NIXL is told. `copied`: bytes that came to the host."""

    def __init__(self, kind: MemoryKind = "DRAM", number: int = 0) -> None:
        self.kind: MemoryKind = kind
        self.number = number
        self.allocated: list[torch.Tensor] = []
        self.copied = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.allocated[-1]

    def host_buffer(self, nbytes: int) -> memoryview:
        return torch.empty(nbytes, dtype=torch.uint8).numpy().data

    def to_host(self, source: torch.Tensor, out: memoryview) -> None:
        self.copied += len(out)
        torch.frombuffer(out, dtype=torch.uint8).copy_(source)

    def settle(self) -> None:
        pass

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()
