"""Packed copies of a CPU model's weights beside them, made for every version before it is committed.

vLLM packs once, when a model is loaded, and would use those copies after a flip. Here each layer has its live weight and
a copy packed from the same bytes: by oneDNN, of experts by vLLM's own kernel.

    stage(v) ── shadow complete ──► pack on this thread, while decoding goes on ──► ready for v
    flip(v)  ── parameters swap ──► v packed now or when it was served before? use its packed copies
                                    else the plain product of the live weights (experts: packed at the next step)

So every product uses the served version, packed or not. On a model of 3 M parameters packed products take a tenth less
time than plain ones, on larger models up to a third less. Costs two more copies of the weights in memory: linear layers
may be left out (`weights.packed`), and those of a large model are held packed alone (`weight_bus.vllm.packed.sets`).
Experts cannot: their kernel knows packed ones alone and makes none plain again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import structlog
import torch
from torch import nn

from weight_bus.memory.throttle import BESIDE_DECODING, CpuThrottle, background_threads
from weight_bus.vllm.experts import DOWN, GATE_AND_UP, LiveExperts, live_experts
from weight_bus.vllm.packed.sets import LEAST_BYTES, PACKING_SHARE, keep_freed_memory, multiplying_layers

_NEVER_PACKED = -1
_log = structlog.get_logger()


class Product:
    """`cpu_linear` of one layer. `packed`: None multiplies by the weight that the layer passes.

    Without oneDNN's products of this dtype it stays None, as vLLM itself goes on without them.
    """

    __slots__ = ("packed",)

    def __init__(self) -> None:
        self.packed: Any = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.packed is None:
            return torch.nn.functional.linear(x, weight, bias)
        from vllm import _custom_ops

        product: torch.Tensor = _custom_ops.onednn_mm(self.packed, x, bias)
        return product

    def pack(self, weights: Sequence[torch.Tensor], _: Callable[[], None]) -> Any:
        """A copy of the layer's one weight."""
        return _pack(weights[0]) if can_pack(weights[0].dtype) else None


class PackedLayers:
    """All linear layers and experts of a model that runs on a CPU; of a model without such layers, none.

    `linears`: else linear layers multiply by their live weights. `pack` belongs on a background thread, `flip` on the
    thread that decodes.
    """

    def __init__(self, model: nn.Module, *, linears: bool = True) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._layers: list[tuple[list[str], Product | LiveExperts]] = []
        """With the names of the weights that each layer's copies are made of."""
        self._before: list[tuple[nn.Module, Any]] = []
        """Modules, and what they multiplied by."""
        self._lock = threading.Lock()
        self._ready: tuple[int, Sequence[Any]] | None = None
        self._kept: tuple[int, Sequence[Any]] | None = None
        """The version before, for a rollback."""
        self._served = self._newest = -1
        # One, whoever asks: an allocator's memory is its thread's, and each that had packed would keep a set of copies.
        self._thread = background_threads("rollmesh-packing", 1)
        for module in model.modules():
            experts = live_experts(module)
            if experts is not None:
                held = [getattr(module, GATE_AND_UP), getattr(module, DOWN)]
                self._layers.append(([names[id(each)] for each in held], experts))
        for name, holders in multiplying_layers(model).items() if linears else ():
            for module in holders:
                product: Any = Product()
                self._before.append((module, module.cpu_linear))
                module.cpu_linear = product
                self._layers.append(([name], product))
        if self._layers:
            keep_freed_memory()

    def pack(self, version: int, storage: Mapping[str, torch.Tensor]) -> None:
        """Pack `version`'s weights, which lie in `storage` by the model's own parameter names. Blocks.

        A newer version ends the packing of an older one.
        """
        if not self._layers:
            return
        with self._lock:
            self._newest = max(self._newest, version)
        self._thread.submit(self._pack, version, storage).result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def unpack(self) -> None:
        """Let all layers multiply by their live weights until the next flip to a version that is packed."""
        self.flip(_NEVER_PACKED)

    def give_back(self) -> None:
        """Let linear layers multiply as they did before."""
        for module, product in self._before:
            module.cpu_linear = product

    def _pack(self, version: int, storage: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            if version < self._newest:
                return
            # The version before is being overwritten. Freed first, its memory is reused for the new copies; so is that of
            # a version that was never served.
            self._kept = self._ready = None
        # Small ones fit the caches and are packed within a step or two: no need for the lower share.
        small = sum(storage[name].nbytes for names, _ in self._layers for name in names) < LEAST_BYTES
        throttle, packed = CpuThrottle(BESIDE_DECODING if small else PACKING_SHARE), []
        for names, layer in self._layers:
            if version < self._newest:
                return
            packed.append(layer.pack([storage[name] for name in names], throttle.rest))
            throttle.rest()
        with self._lock:
            # A superseded version is packed from bytes that were overwritten.
            if version >= self._newest:
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
            self._ready, self._kept = None, (self._served, [layer.packed for _, layer in self._layers])
            self._served = version
            for (_, layer), packed in zip(self._layers, copies, strict=True):
                layer.packed = packed


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of vLLM has oneDNN's products, and this CPU those of `dtype`: not of 16 bits without AVX-512."""
    if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        return False
    try:
        _pack(torch.zeros(64, 64, dtype=dtype))
    except RuntimeError as error:
        _log.warning("linear layers are not packed", dtype=str(dtype).removeprefix("torch."), why=str(error))
        return False
    return True


def _pack(weight: torch.Tensor) -> Any:
    from vllm import _custom_ops

    # As vLLM calls it; the number is how many batch sizes it remembers a kernel for.
    return _custom_ops.create_onednn_mm(weight.detach().t(), 32)
