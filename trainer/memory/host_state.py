"""An optimizer whose state is in the host's memory between steps (`trainer.optimizer.offload`).

    host      state of all weights, pinned       ──►┐             ┌──► back, into the same memory
    device    weights and gradients of a part       └── the step ─┘                              part after part

Weights and gradients stay where they are; a step takes the time to move the state there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

PART_BYTES = 256 << 20
"""Of weights, of which the state is on the device at a time."""


class Places(Protocol):
    """Where state is, between steps and in one."""

    def to_device(self, held: Tensor, like: Tensor) -> Tensor:
        """`held` where the weight `like` is."""

    def to_host(self, tensor: Tensor, held: Tensor | None) -> Tensor:
        """`tensor` in the host's memory: in that of `held`, which it was read from, where there is one."""


class PinnedMemory:
    """The host's, which a GPU reads and writes by itself."""

    def to_device(self, held: Tensor, like: Tensor) -> Tensor:
        return held.to(like.device, non_blocking=True)

    def to_host(self, tensor: Tensor, held: Tensor | None) -> Tensor:
        if held is None:
            held = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return held.copy_(tensor, non_blocking=True)


class HostState(Optimizer):
    """`inner`, by whose rule weights are changed, with its state in the host's memory. The bytes are those that it gives
    alone. Groups and state are this one's: who saves, loads or sets the learning rate sees one optimizer."""

    def __init__(self, inner: Optimizer, places: Places | None = None, part_bytes: int = PART_BYTES) -> None:
        self._inner, self._places, self._part_bytes = inner, places or PinnedMemory(), part_bytes
        super().__init__(inner.param_groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. `closure` is refused: the gradient is there already."""
        if closure is not None:
            raise ValueError("a closure would be called once for each part: compute the gradient before the step")
        for group in self.param_groups:
            for part in self._parts(group["params"]):
                self._step_of({**group, "params": part})
        if torch.cuda.is_available():
            # What is on its way to the host may be saved next.
            torch.cuda.synchronize()

    def _parts(self, weights: list[Tensor]) -> Iterator[list[Tensor]]:
        part: list[Tensor] = []
        size = 0
        for weight in weights:
            if part and size + weight.nbytes > self._part_bytes:
                yield part
                part, size = [], 0
            part.append(weight)
            size += weight.nbytes
        if part:
            yield part

    def _step_of(self, group: dict[str, Any]) -> None:
        held = {weight: dict(self.state.get(weight, {})) for weight in group["params"]}
        for weight, state in held.items():
            self._inner.state[weight] = {name: self._places.to_device(tensor, weight) for name, tensor in state.items()}
        self._inner.param_groups = [group]
        self._inner.step()
        for weight, before in held.items():
            after = self._inner.state.pop(weight, {})
            if after:
                self.state[weight] = {name: self._places.to_host(one, before.get(name)) for name, one in after.items()}
