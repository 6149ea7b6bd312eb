"""Expert parallelism: the experts of each layer on several ranks, by the plan that `transformers` has for the family.

    rank 0   its tokens ──┐ all-to-all ┌── tokens for experts 0 … 3 ──┐ all-to-all ┌── weighed, added up
    rank 1   its tokens ──┘            └── tokens for experts 4 … 7 ──┘            └── weighed, added up

The ranks may have tokens of their own (data, context) or the same ones (tensor: each sends its part of them). Routers and
all else are whole on each rank. Experts become DTensors on the mesh, `Shard(0)`.

The gradient of an expert is complete where it is: that of the sum of all ranks' losses, and must not be summed over the
mesh again. Where gradients of all else are averaged instead, so must these be (`averaged`).
Every rank makes as many passes as the others, with at least one token each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    _get_parameter_plan,
    apply_expert_parallelism,
    replace_layer_number_by_wildcard,
)

from services.wire.errors import UsageError
from trainer.parallel.gradients import on_the_way

_DISPATCH, _CUT = "ep_dispatch_experts", "grouped_gemm"


def expert_plan(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """How the experts of `model` are cut for `ranks`, by names with `*` for a layer's number. `model` may be on meta.

    Its names are what `tensor_parallel` is to leave alone. Raises UsageError for a family that has no such plan, and for
    experts that do not divide.
    """
    kind, plan = model.config.get_text_config().model_type, dict(model.ep_plan)
    if _DISPATCH not in plan.values() or set(plan.values()) - {_DISPATCH, _CUT}:
        raise UsageError(
            f"trainer.parallel.expert={ranks}: there is no plan for {kind} models to send tokens to experts on other ranks",
            "set trainer.parallel.expert=1",
        )
    for name, parameter in model.named_parameters():
        if _get_parameter_plan(name, plan) == _CUT and parameter.shape[0] % ranks:
            raise UsageError(
                f"trainer.parallel.expert={ranks}: {name} holds {parameter.shape[0]} experts, which does not divide",
                f"set trainer.parallel.expert to a divisor of {parameter.shape[0]}",
            )
    return plan


def expert_parallel(model: PreTrainedModel, mesh: DeviceMesh, tensor: DeviceMesh | None = None) -> PreTrainedModel:
    """Cut the experts of `model` on `mesh`, of one dimension, and return it; whole weights on each rank before, or on meta.

    `tensor`: the mesh of the ranks that have the same tokens, all of them ranks of `mesh`; cut the rest of the model on it
    by `tensor_parallel(model, tensor, expert_plan(…))`. Raises UsageError as `expert_plan`.
    """
    apply_expert_parallelism(model, mesh, tensor, expert_plan(model, mesh.size()))
    return model


def experts_on(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """The modules of `model` whose own weights are cut on `mesh`: each layer's experts."""
    return [
        module
        for module in model.modules()
        if any(isinstance(each, DTensor) and each.device_mesh == mesh for each in module.parameters(recurse=False))
    ]


def dispatching(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of `model` that send tokens to experts on other ranks, once they are cut; whatever was sharded since."""
    plan = model.ep_plan
    return [
        module
        for name, module in model.named_modules()
        if plan.get(replace_layer_number_by_wildcard(name)) == _DISPATCH
    ]


def averaged(experts: nn.Module, ranks: int) -> None:
    """Whenever `experts` are called, the gradient of their weights is divided by `ranks`: of the sum over those that send
    them tokens it becomes the mean."""
    on_the_way(experts, lambda weight: _Divided.apply(weight, ranks))  # type: ignore[no-untyped-call]


class _Divided(torch.autograd.Function):
    """The tensor itself; its gradient is divided."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] / ctx.ranks, None
