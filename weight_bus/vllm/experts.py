"""vLLM's fused experts by the folder's names, one tensor an expert; on a CPU, packed copies that follow the served version.

    vLLM      experts.routed_experts.w13_weight [E, 2·I, H]     of each expert the gate's rows, below them the up rows
                                     w2_weight  [E, H, I]
    folder    experts.0.gate_proj.weight [I, H]   experts.0.up_proj.weight [I, H]   experts.0.down_proj.weight [H, I] …

Tensor parallel ranks hold `I / ranks` rows of gate and up and as many columns of down; expert parallel ranks hold whole
experts, and of the others slices without a row. Read off the layers' attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weight_bus.errors import StageError
from weight_bus.receiver.slices import Slice
from weight_bus.vllm.quantised import plain_of

GATE_AND_UP, DOWN = "w13_weight", "w2_weight"
_AS_LOADED = ("TRITON", "BATCHED_TRITON", "CPU")
"""vLLM's kernels that compute with experts as they were loaded. Others swap the halves or shuffle the bytes."""


def is_experts(module: nn.Module) -> bool:
    """Whether it holds a layer's fused experts."""
    return hasattr(module, "expert_map_manager") and hasattr(module, GATE_AND_UP)


def expert_views(
    name: str, module: nn.Module, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, Slice | None]]:
    """Name, view and slice of every expert's weights in `tensor`, memory of the fused parameter `name` of `module`.

    Raises StageError, naming the parameter, for experts that are quantised, or held in a way that is not known here.
    """
    owner, _, leaf = name.rpartition(".")
    held: Any = module
    sizes = held.moe_config
    rows = sizes.intermediate_size_per_partition
    expected = {GATE_AND_UP: (2 * rows, sizes.hidden_dim), DOWN: (sizes.hidden_dim, rows)}.get(leaf, ())
    if (
        tuple(tensor.shape) != (held.local_num_experts, *expected)
        or not expected
        or rows != sizes.intermediate_size_per_partition_unpadded
    ):
        raise StageError(
            f"{name} of shape {tuple(tensor.shape)} is not replaceable: of experts, gate, up and down projections are",
            "this model type needs a rule in weight_bus/vllm/experts.py, or use --engine torch",
        )
    _check_as_loaded(name, held)
    # vLLM holds the experts one module below the name that the folder gives them.
    prefix, _, _ = owner.rpartition(".")
    for expert in range(held.global_num_experts):
        here = int(held.expert_map_manager.map_global_to_local(expert))
        whole = tensor[here] if here >= 0 else tensor.new_empty(expected)
        if leaf == DOWN:
            parts = {held.ckpt_down_proj_name: (whole, 1)}
        else:
            parts = {held.ckpt_gate_proj_name: (whole[:rows], 0), held.ckpt_up_proj_name: (whole[rows:], 0)}
        for part, (view, dim) in parts.items():
            spread = held.local_num_experts < held.global_num_experts
            yield f"{prefix}.{expert}.{part}.weight", *_slice(view, dim, sizes, here=here >= 0, spread=spread)


def _slice(view: torch.Tensor, dim: int, sizes: Any, *, here: bool, spread: bool) -> tuple[torch.Tensor, Slice | None]:
    ranks = int(sizes.tp_size)
    shape = tuple(size * ranks if each == dim else size for each, size in enumerate(view.shape))
    if spread and ranks == 1:
        # A slice also where it is all of it: what is none, every rank has.
        return view if here else view[:0], Slice(shape, 0, 0)
    return view, None if ranks == 1 else Slice(shape, dim, int(sizes.tp_rank) * view.shape[dim])


def _check_as_loaded(name: str, module: Any) -> None:
    if plain_of(module) is not None:
        return
    backend = getattr(module.quant_method, "unquantized_backend", None)
    if backend is None:
        raise StageError(
            f"{name} is quantised ({type(module.quant_method).__name__})",
            "serve the model in float32, bfloat16 or float16",
        )
    if backend.name not in _AS_LOADED:
        raise StageError(
            f"{name} is held in the layout of vLLM's kernel {backend.name}", "set rollout.vllm.moe_backend=triton"
        )
    if backend.name == "CPU" and live_experts(module) is None:
        raise StageError(f"vLLM packed {name} away", f"start the engine through rollmesh, which keeps {name} live")


class LiveExperts:
    """`apply` of one layer's experts on a CPU. vLLM would pack `w1` and `w2` once, in place of the layer's weights.

    `packed`: copies of what the layer passes, in the layout of vLLM's kernel; None: they are made when they are needed.
    """

    def __init__(self, experts: Any) -> None:
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._isa: str = experts.isa
        sizes = experts.moe_config
        self._rows: int = sizes.intermediate_size_per_partition
        self._padded: int = experts._padded_intermediate_size(sizes)

    def __call__(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        *,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        from vllm import _custom_ops

        if expert_map is not None:
            # The kernel knows no experts of other ranks: one of ours takes their place, with a weight of zero.
            topk_ids = expert_map[topk_ids.long()]
            known = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
            topk_weights, apply_router_weight_on_input = known.masked_fill(topk_ids < 0, 0.0), False
            topk_ids = topk_ids.clamp(min=0)
        if self.packed is None:
            self.packed = self.pack([w1, w2], lambda: None)
        w13, down = self.packed
        _custom_ops.cpu_fused_moe(
            output,
            hidden_states,
            w13,
            down,
            None,
            None,
            topk_weights,
            topk_ids,
            activation.value,
            self._isa,
            apply_router_weight_on_input,
        )

    @torch.inference_mode()
    def pack(self, weights: Sequence[torch.Tensor], rest: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies as vLLM makes them, of gate and up and of down: the kernel's tiles need rows of zeros below gate and up,
        and columns beside down. `rest` is called between experts.
        """
        w13, w2 = weights
        more, rows = self._padded - self._rows, self._rows
        gate_and_up = w13.new_empty((len(w13), 2 * self._padded, w13.shape[2]))
        down = w2.new_empty((*w2.shape[:2], self._padded))
        for expert in range(len(w13)):
            halves = w13[expert].view(2, rows, -1)
            padded = nn.functional.pad(halves, (0, 0, 0, more)).view(1, 2 * self._padded, -1)
            torch.ops._C.prepack_moe_weight(padded, gate_and_up[expert : expert + 1], self._isa)
            columns = nn.functional.pad(w2[expert : expert + 1], (0, more))
            torch.ops._C.prepack_moe_weight(columns, down[expert : expert + 1], self._isa)
            rest()
        return gate_and_up, down


def live_experts(module: nn.Module) -> LiveExperts | None:
    """What computes a layer's experts, where it follows their weights."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    found = getattr(getattr(kernel, "fused_experts", None), "apply", None)
    return found if isinstance(found, LiveExperts) else None


_WRAPPED = "rollmesh_original_process"


def keep_experts_live() -> None:
    """Make vLLM leave experts as they were loaded, and compute with copies that follow them. For a CPU. Idempotent.

    Experts with biases, and those of another library's kernel, stay as vLLM has them: they are refused by name.
    """
    from vllm.model_executor.kernels.linear.zentorch_utils import is_zentorch_moe_supported
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if hasattr(CPUUnquantizedExperts, _WRAPPED):
        return
    original = CPUUnquantizedExperts.process_weights_after_loading

    def process(experts: Any, layer: nn.Module) -> None:
        if hasattr(layer, "w13_bias") or is_zentorch_moe_supported(layer):
            original(experts, layer)
        else:
            experts.apply = LiveExperts(experts)

    setattr(CPUUnquantizedExperts, _WRAPPED, original)
    CPUUnquantizedExperts.process_weights_after_loading = process


def keep_experts_beside_adapters() -> None:
    """Make vLLM compute experts on a CPU as ever where other layers have adapters. Idempotent.

    It would take Triton's kernel for them, which a CPU has not, because experts might get adapters; ours never do.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    original = method.select_unquantized_moe_backend
    if hasattr(original, _WRAPPED):
        return

    def select(moe_config: Any) -> Any:
        return original(replace(moe_config, is_lora_enabled=False))

    setattr(select, _WRAPPED, original)
    method.select_unquantized_moe_backend = select
