"""A CPU model's matrices held packed alone: one set of weights beside the served one, where packed copies took three.

    spare    bytes arrive as they are published ── every hash good ──► packed, in the same memory ──┐ flip: the layers'
    served   packed: what layers multiply by   ◄────────────────────────────────────────────────────┘ products change
                └─ made plain again, a matrix at a time: for a digest, and as the base of a delta

Torch packs for oneDNN as vLLM does, its products have the very same bits, and unlike vLLM's its packed matrices can be made
plain again. A call takes some 14 µs more, so that small models are packed by vLLM (`weight_bus.vllm.packed.layers`).

An embedding that is looked up stays plain in both sets. Where a layer multiplies by it too (a tied output head) the
product has packed copies beside it, made when it is first used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, get_args

import torch
from torch import nn

from services.config.settings import PackedWeights
from services.wire.errors import UsageError
from weight_bus.manifest.tensors import bytes_under, flat_bytes
from weight_bus.memory.throttle import CpuThrottle
from weight_bus.vllm.protocol import PACKED
from weight_bus.vllm.sets import Held, Tensors, bytes_of

LEAST_BYTES = 32 << 20
"""Of matrices that are packed. Below, three sets more are little, and a call's 14 µs are much."""
PACKING_SHARE = 0.12
"""CPU share for packing. Packed decoding is bound by memory bandwidth, and packing reads and writes as many bytes: at half
a core it slowed decoding by a seventh (measured)."""
_IN_PLACE_SHARE = 0.13
"""Likewise, of packing into memory that stays, which takes a quarter more CPU time: an update takes no longer than with
copies beside (measured)."""
# glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ROWS = 32
"""That oneDNN is asked to lay a matrix out for."""


class PackedMatrix:
    """A matrix `[out, in]` packed, in memory of its own that never moves.

    `plain` is the same memory as a matrix as it is published: to write to, before `pack`; afterwards its words mean
    nothing. `rows`: how many of its rows are published; those below, of padding, are the same in every version.
    """

    def __init__(self, weight: torch.Tensor, rows: int | None = None) -> None:
        self.packed = _packed(weight)
        self._memory = _memory_of(self.packed)
        self.plain = self._memory[: weight.nbytes].view(weight.dtype).view(weight.shape)
        self._rows = weight.shape[0] if rows is None else rows
        self._padding = weight[self._rows :].clone()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack what was written to `plain`. Takes as much memory as the matrix meanwhile."""
        self.plain[self._rows :] = self._padding
        self.take(self.plain)

    @torch.inference_mode()
    def take(self, weight: torch.Tensor) -> None:
        """Become `weight`, packed."""
        made = _packed(weight)
        self._memory.copy_(_memory_of(made))

    def restored(self) -> torch.Tensor:
        """A new matrix, as it was before it was packed, to the bit."""
        plain: torch.Tensor = self.packed.to_dense()
        return plain


class HeldProduct:
    """`cpu_linear` of a layer whose weight is held packed alone. `matrix`: None multiplies by the weight that the layer
    passes, which is not read otherwise."""

    __slots__ = ("matrix", "multiply")

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix: torch.Tensor | None = matrix
        self.multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.matrix is None:
            return nn.functional.linear(x, weight, bias)
        product: torch.Tensor = self.multiply(x, self.matrix, bias, "none", [], "")
        return product


class BesideProduct:
    """`cpu_linear` of a layer whose weight is looked up too, and so plain: multiplies by a packed copy of it.

    `served` and `spare`: copies of the weight in the two sets; None until one is needed. `plain`: multiply by the weight.
    """

    __slots__ = ("multiply", "plain", "served", "spare")

    def __init__(self) -> None:
        self.plain = False
        self.served: PackedMatrix | None = None
        self.spare: PackedMatrix | None = None
        self.multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.plain:
            return nn.functional.linear(x, weight, bias)
        if self.served is None:
            self.served = PackedMatrix(weight)
        product: torch.Tensor = self.multiply(x, self.served.packed, bias, "none", [], "")
        return product

    def keep(self, spare: torch.Tensor) -> None:
        """Pack the spare set's weight, where there were products."""
        if self.served is None:
            self.spare = None
        elif self.spare is None:
            self.spare = PackedMatrix(spare)
        else:
            self.spare.take(spare)


class PackedSets:
    """`weight_bus.vllm.sets.Sets` of a model whose `layers` multiply by packed matrices: two sets that change places.

    `layers`: the modules whose product multiplies by a parameter, by that parameter's name; `rows`: how many of a
    parameter's rows are published, where that is not all. In `live` a matrix is packed: `restored` makes it plain. The
    modules' own `weight` is not a number afterwards, so that what reads it past `cpu_linear` is seen at once.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layers: Mapping[str, list[nn.Module]],
        rows: Mapping[str, int] | None = None,
    ) -> None:
        self.live: Tensors = {}
        self.spare: Tensors = {}
        self._parameters: dict[str, nn.Parameter] = {}
        """Those that lie plain in both sets."""
        self._products: dict[str, list[HeldProduct]] = {}
        self._beside: list[tuple[str, BesideProduct]] = []
        self._matrices: dict[int, dict[str, PackedMatrix]] = {id(self.live): {}, id(self.spare): {}}
        """Of each set, by the mapping's identity, which stays while the two change places."""
        self._before: list[tuple[nn.Module, Any]] = []
        """Modules, and what they multiplied by."""
        self._alone: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            holders = layers.get(name, [])
            if holders and all(_multiplies_alone(module) for module in holders):
                self._hold(name, parameter, holders, (rows or {}).get(name))
                continue
            self._parameters[name] = parameter
            self.live[name] = parameter.data
            # A copy, not merely memory: rows of padding are in no manifest and must be the same in both.
            self.spare[name] = parameter.data.clone(memory_format=torch.preserve_format)
            for module in holders:
                product = BesideProduct()
                self._replace(module, product)
                self._beside.append((name, product))
        keep_freed_memory()

    def _hold(self, name: str, parameter: nn.Parameter, holders: list[nn.Module], rows: int | None) -> None:
        for storage in (self.live, self.spare):
            matrix = PackedMatrix(parameter.data, rows)
            self._matrices[id(storage)][name] = matrix
            storage[name] = matrix.plain
        self._products[name] = []
        for module in holders:
            product = HeldProduct(self._matrices[id(self.live)][name].packed)
            self._replace(module, product)
            self._products[name].append(product)
        self._alone[name] = parameter
        # vLLM's copy of it goes.
        parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
        _return_freed_memory()

    def _replace(self, module: nn.Module, product: Any) -> None:
        self._before.append((module, module.cpu_linear))
        module.cpu_linear = product

    @torch.inference_mode()
    def unpack(self) -> None:
        """Multiply by the modules' own weights until the next flip. `live` has them then, as they are published, and is
        not packed: what was written to it cannot be flipped back to."""
        for name, matrix in self._of(self.live).items():
            matrix.plain.copy_(matrix.restored())
            self._alone[name].data = matrix.plain
            for product in self._products[name]:
                product.matrix = None
        for _, beside in self._beside:
            beside.plain = True

    def give_back(self) -> None:
        """Leave the model as it was, serving what is served."""
        self.unpack()
        for module, product in self._before:
            module.cpu_linear = product

    @property
    def held(self) -> Held:
        matrices = [*self._of(self.spare).values(), *(each.spare for _, each in self._beside if each.spare is not None)]
        plain = bytes_of({name: self.spare[name] for name in self._parameters})
        return Held(plain + sum(matrix.nbytes for matrix in matrices))

    def keep(self) -> None:
        """Pack what was staged. On a background thread."""
        throttle = CpuThrottle(_IN_PLACE_SHARE)
        for matrix in self._of(self.spare).values():
            matrix.pack()
            throttle.rest()
        for name, product in self._beside:
            product.keep(self.spare[name])
            throttle.rest()

    def flip(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self.spare[name]
        self.live, self.spare = self.spare, self.live
        served = self._of(self.live)
        for name, products in self._products.items():
            for product in products:
                product.matrix = served[name].packed
        for _, beside in self._beside:
            beside.served, beside.spare, beside.plain = beside.spare, beside.served, False

    def flip_back(self) -> None:
        self.flip()

    @property
    def held_alone(self) -> Collection[str]:
        """The parameters whose memory is packed."""
        return self._alone.keys()

    def restored(self, storage: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        """Parameter `name`, one of `held_alone`, of `storage`: one of the two sets, and packed."""
        return self._of(storage)[name].restored()

    def _of(self, storage: Mapping[str, torch.Tensor]) -> dict[str, PackedMatrix]:
        return self._matrices[id(storage)]


def keep_freed_memory() -> None:
    """Make this process's allocator keep freed memory, if it is glibc's.

    Returned to the system, it would come back as fresh pages, which cost as much as the packing itself (measured).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        # A thread's own arena returns its memory when its heap is empty, whatever the thresholds say.
        mallopt(_M_ARENA_MAX, 1)


def _return_freed_memory() -> None:
    """Else glibc would keep it: aligned otherwise, the next matrix does not fit where the last one lay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def multiplying_layers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Modules that multiply by a matrix through `cpu_linear`, by the name of their parameter."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if callable(getattr(module, "cpu_linear", None)) and weight is not None and weight.ndim == 2:
            found.setdefault(names[id(weight)], []).append(module)
    return found


def packing(text: str) -> PackedWeights:
    """Raises UsageError for another word."""
    for word in get_args(PackedWeights):
        if text == word:
            return word  # type: ignore[no-any-return]
    raise UsageError(f"{PACKED}={text}: matrices cannot be held so", f"known: {', '.join(get_args(PackedWeights))}")


def is_held_packed(
    asked: PackedWeights, parameters: Mapping[str, torch.Tensor], layers: Mapping[str, list[nn.Module]]
) -> bool:
    """Whether the matrices that `layers` multiply by are held packed alone: where that was asked for, or is worth it, and
    torch packs all of their dtypes and makes them plain again to the bit.
    """
    matrices = [parameters[name] for name in layers]
    wanted = asked == "alone" or (asked == "auto" and sum(matrix.nbytes for matrix in matrices) >= LEAST_BYTES)
    return wanted and bool(matrices) and all(_comes_back(dtype) for dtype in {matrix.dtype for matrix in matrices})


@cache
def _comes_back(dtype: torch.dtype) -> bool:
    """Not 16 bits on a CPU without AVX-512, nor any dtype where torch is built without oneDNN."""
    # Words of all kinds, also below zero and too small to be normal.
    words = (torch.arange(96 * 80 * 8) * 37).remainder(251).to(torch.uint8)
    weight = words.view(dtype)[: 96 * 80].nan_to_num(0.0, 0.0, 0.0).view(96, 80)
    try:
        back = PackedMatrix(weight).restored()
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(bytes_under(back), bytes_under(weight))


def _multiplies_alone(module: nn.Module) -> bool:
    """Whether nothing but the product reads the module's weight: it is no embedding."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, (nn.Linear, LinearBase, ParallelLMHead))


def _packed(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    return packed


def _memory_of(packed: torch.Tensor) -> torch.Tensor:
    """uint8 `[n]` over a packed matrix's memory, which torch shows no other way."""
    array: Any = (ctypes.c_ubyte * torch.ops.mkldnn._nbytes(packed)).from_address(torch.ops.mkldnn.data_ptr(packed))
    array.owner = packed
    return flat_bytes(memoryview(array))
