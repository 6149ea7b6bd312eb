"""Packed copies of a CPU model's weights, made anew for every version before it is served.

vLLM's own packing happens once, when a model is loaded, and would go on being served after a flip. Here the layers hold
their live weights, and beside them a copy that oneDNN has packed from the very same bytes:

    stage(v) ─ shadow complete ─► pack (this thread, decoding goes on) ─► ready for v
    flip(v)  ─ parameters swap ─► ready for v, or kept from when v was served? its packed copies are swapped in
                                  ─► else the plain product of live weights

So a product is always that of the version that is served, packed or not. On a model of 3 M parameters it takes a tenth
less time than the plain product, on larger ones up to a third. Costs two more copies of the weights in memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weight_bus.memory.throttle import BESIDE_DECODING, CpuThrottle

_SHARE = 0.12
"""Of a core. Packed products decode as fast as memory can be read, and packing reads and writes as many bytes: at half a
core (`weight_bus.memory.throttle`) it took a seventh of their pace away (measured)."""
_SMALL_BYTES = 32 << 20
"""Weights of fewer bytes are packed between a step or two, and out of caches: they are not worth the longer wait."""
# glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class Product:
    """`cpu_linear` of one layer. `packed`: None multiplies by the weight that the layer passes."""

    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed: Any = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is None:
            return torch.nn.functional.linear(x, weight, bias)
        from vllm import _custom_ops

        product: torch.Tensor = _custom_ops.onednn_mm(self.packed, x, bias)
        return product


class PackedLinears:
    """All linear layers of a model that runs on a CPU; of a model without such layers, none.

    `pack` belongs on a background thread, `flip` on the thread that decodes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._layers: list[tuple[str, Product]] = []
        self._lock = threading.Lock()
        self._ready: tuple[int, Sequence[Any]] | None = None
        self._kept: tuple[int, Sequence[Any]] | None = None
        """Of the version before, for a rollback."""
        self._served = -1
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not callable(getattr(module, "cpu_linear", None)) or weight is None or weight.ndim != 2:
                continue
            product: Any = Product()
            module.cpu_linear = product
            self._layers.append((names[id(weight)], product))
        if self._layers and can_pack():
            _keep_freed_memory()

    def pack(self, version: int, storage: Mapping[str, torch.Tensor]) -> None:
        """Pack `version`'s weights, which lie in `storage` by the model's own parameter names."""
        if not can_pack():
            return
        with self._lock:
            # The version before is being written over. Freed first, its memory is there for what follows.
            self._kept = None
        small = sum(storage[name].nbytes for name, _ in self._layers) < _SMALL_BYTES
        throttle, packed = CpuThrottle(BESIDE_DECODING if small else _SHARE), []
        for name, _ in self._layers:
            packed.append(_pack(storage[name]))
            throttle.rest()
        with self._lock:
            # One that was superseded while it was packed may come late, and its bytes be another's.
            if self._ready is None or self._ready[0] < version:
                self._ready = version, packed

    def flip(self, version: int) -> None:
        """`version` is served from now on."""
        with self._lock:
            if version == self._served:
                return
            copies: Sequence[Any] = [None] * len(self._layers)
            for known in (self._ready, self._kept):
                if known is not None and known[0] == version:
                    copies = known[1]
            self._ready, self._kept = None, (self._served, [product.packed for _, product in self._layers])
            self._served = version
            for (_, product), packed in zip(self._layers, copies, strict=True):
                product.packed = packed


def can_pack() -> bool:
    """Whether this build of vLLM has oneDNN's products."""
    return hasattr(torch.ops._C, "create_onednn_mm_handler")


def _keep_freed_memory() -> None:
    """Have this process's allocator keep what is freed, where it is glibc's.

    It would give it back to the system, whose fresh pages cost as much as the packing itself (measured).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        # Memory of a thread's own arena goes back when its heap is empty, whatever the thresholds say.
        mallopt(_M_ARENA_MAX, 1)


def _pack(weight: torch.Tensor) -> Any:
    from vllm import _custom_ops

    # As vLLM calls it; the number is how many batch sizes it remembers a kernel for.
    return _custom_ops.create_onednn_mm(weight.detach().t(), 32)
