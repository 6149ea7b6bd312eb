"""Weights over ranks (FSDP2): each rank holds a share of each layer's, and has all of one layer's while it computes it.

    forward      layer ─all-gather─► computes ─► lets go of the others' weights          root: embeddings, norm, head
    backward     layer ─all-gather─► computes ─reduce-scatter─► this rank's share of the gradient, a mean over ranks

Where there is memory for the weights of all layers, they may stay from the forward to the backward pass, which spares the
second of the two all-gathers (`trainer.parallel.reshard_after_forward`).

With `replicate` (HSDP) shares are of the ranks of one replica, and gradients are averaged over replicas too. With
`context` they are of data and context ranks together.

Experts that data ranks split (`trainer.parallel.expert`) are cut first, whole ones to a rank of each group of `expert`
neighbours; ranks that then have the same experts share the weights of these as above.

    4 data ranks, expert = 2      rank 0, 2: experts 0 … 3, half of each one's weights      rank 1, 3: experts 4 … 7
`fully_shard`'s root must be entered by its own forward: whatever calls layers by themselves does so `inside` it.

A model on meta has no weights until they are read, after it is sharded: no rank ever has all of them.

Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.policies.training.layout import Layout
from services.wire.errors import UsageError
from trainer.parallel.exchange import share_memory
from trainer.parallel.expert import averaged, expert_parallel, expert_plan, experts_on
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor import tensor_parallel

Fill = Callable[[PreTrainedModel, torch.device], None]
"""Reads this rank's part of the weights of a model that was on meta when it was sharded."""
_ENTRY = "rollmesh_inside"
_Found = TypeVar("_Found")


def cut(model: PreTrainedModel, ranks: Ranks) -> None:
    """Cut the layers of `model` on tensor ranks, and its experts on the ranks that split them. Before, it is on meta, or
    all ranks have it whole.

    Before `shard`. Raises UsageError for a family that cannot be cut so.
    """
    if ranks.mesh is None:
        return
    layout, apart = ranks.layout, dict[str, str]()
    if ranks.experts is not None:
        mesh = ranks.experts["expert"]
        expert_parallel(model, mesh)
        for experts in experts_on(model, mesh):
            averaged(experts, layout.expert)
    elif layout.expert > 1:
        apart = expert_plan(model, layout.expert)
        expert_parallel(model, ranks.mesh["tensor"], ranks.mesh["tensor"])
    if layout.tensor > 1:
        tensor_parallel(model, ranks.mesh["tensor"], apart)


def shard(model: nn.Module, ranks: Ranks, *, reshard: bool = True) -> None:
    """Spread the weights of `model` over `ranks`. Before, it is on meta, or all have it whole; then its parameters are
    DTensors. `reshard`: whether a layer lets go of the others' weights after its forward pass, or after its backward pass.

    Nothing where there is one rank. Passes are made, and optimizers, after it. Raises UsageError for an architecture whose
    layers are not known as such.
    """
    if ranks.mesh is None:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"trainer.parallel: {type(model).__name__} has no layers that weights could be sharded by", "use one rank"
        )
    mesh = mesh_of_shares(ranks.mesh, ranks.layout)
    if ranks.experts is not None:
        _shard_experts(model, ranks, ranks.experts, reshard)
    sharded = [fully_shard(layer, mesh=mesh, reshard_after_forward=reshard) for layer in layers]
    if not reshard:
        for each in sharded:
            _let_go_without_backward(each)
    # Of the root it is for FSDP2 to say: what is of no layer is needed again at once.
    sharded.append(fully_shard(model, mesh=mesh))
    _let_go_without_backward(sharded[-1])
    share_memory(sharded, mesh.get_group(mesh.ndim - 1), ranks.shared)
    setattr(model, _ENTRY, MethodType(_call, model))
    register_fsdp_forward_method(model, _ENTRY)


def _shard_experts(model: nn.Module, own: Ranks, mesh: DeviceMesh, reshard: bool) -> None:
    """Ranks that have the same experts share their weights. Raises UsageError where these do not divide."""
    layout = own.layout
    same = mesh_of_same_experts(mesh, layout)
    ranks = layout.data // layout.expert * layout.context

    def placed(weight: nn.Parameter) -> Shard:
        # By experts, where each rank gets as many: torch takes no other part of them.
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        for dim, size in enumerate(local.shape):
            if size % ranks == 0:
                return Shard(dim)
        raise UsageError(
            f"trainer.parallel.expert={layout.expert}: {ranks} ranks have the same experts, and {list(local.shape)} of "
            "their weights cannot be divided among these",
            "set trainer.parallel.expert to more of the data ranks",
        )

    sharded = [
        fully_shard(each, mesh=same, reshard_after_forward=reshard, shard_placement_fn=placed)
        for each in experts_on(model, mesh["expert"])
    ]
    if not reshard:
        for each in sharded:
            _let_go_without_backward(each)
    share_memory(sharded, same.get_group(same.ndim - 1), own.shared)


def mesh_of_shares(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Whose ranks hold shares. Context ranks do, too: each has a part of every gradient."""
    if layout.context == 1:
        return mesh["replicate", "data"] if layout.replicate > 1 else mesh["data"]
    shares = mesh["data", "context"]._flatten("data_context")
    # Flattened dimensions are found on the mesh that they are of.
    return mesh["replicate", "data_context"] if layout.replicate > 1 else shares


def mesh_of_same_experts(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Whose ranks share the weights of the experts that they all have. `mesh`: `Ranks.experts`."""
    if layout.context == 1:
        return mesh["replicate", "spread"] if layout.replicate > 1 else mesh["spread"]
    same = mesh["spread", "context"]._flatten("spread_context")
    return mesh._get_root_mesh()["replicate", "spread_context"] if layout.replicate > 1 else same


def inside(model: nn.Module, work: Callable[[], _Found]) -> _Found:
    """`work()`, which calls parts of `model` by themselves, as a forward pass of it. Tensors that it returns have gradients
    only where they stand in tuples, lists or dicts. What it raises leaves nothing gathered, nor does a pass without
    gradients."""
    entry: Callable[[Callable[[], _Found]], _Found] | None = getattr(model, _ENTRY, None)
    if entry is None:
        return work()
    try:
        found = entry(work)
    except BaseException:
        let_go(model)
        raise
    if not torch.is_grad_enabled():
        let_go(model)
    return found


def let_go(model: nn.Module) -> None:
    """Give up weights that were collected for a pass: those of no layer are kept for the backward pass, which some passes
    have not. Until then the model's parameters are the whole ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks; a collective of theirs where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _let_go_without_backward(module: FSDPModule) -> None:
    """A pass that no backward pass follows leaves no weights collected: they would be in the way of other models, and be
    those of before the next step."""
    assert isinstance(module, nn.Module)

    def passed(*_: object) -> None:
        if not torch.is_grad_enabled():
            module.reshard()

    # After FSDP2's own, which leaves them.
    module.register_forward_hook(passed)


def _call(_: nn.Module, work: Callable[[], _Found]) -> _Found:
    return work()
