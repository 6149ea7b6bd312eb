"""Weights of a model that is idle most of the time, in the host's memory but while they are used (`trainer.offload_idle`).

    host ──load──► device: passes, a step ──store──► host, written back only where they have changed

The same memory of the host is used each time. In between, saving and loading find the weights there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.memory.host_state import PinnedMemory, Places


class HostWeights:
    """Of `model`, which is on the device that it is used on when this is made, and in the host's memory from then on."""

    def __init__(self, model: nn.Module, places: Places | None = None) -> None:
        self._places = places or PinnedMemory()
        self._tensors = [*model.parameters(), *model.buffers()]
        self._there = torch.empty(0, device=self._tensors[0].device)
        self._held = [self._places.to_host(tensor.data, None) for tensor in self._tensors]
        self._loaded = True
        self.store()

    def load(self) -> None:
        """Copy them to the device; nothing where they are there."""
        if not self._loaded:
            for tensor, held in zip(self._tensors, self._held, strict=True):
                tensor.data = self._places.to_device(held, self._there)
            self._loaded = True

    def store(self, *, changed: bool = False) -> None:
        """Give their memory on the device back. `changed`: since they were loaded. There must be no gradients."""
        if not self._loaded:
            return
        for tensor, held in zip(self._tensors, self._held, strict=True):
            tensor.data = self._places.to_host(tensor.data, held) if changed else held
        if self._there.is_cuda:
            # The copies read what is given back.
            torch.cuda.synchronize()
        self._loaded = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within, they are on the device; nothing changes them."""
        self.load()
        try:
            yield
        finally:
            self.store()
