"""Weights over ranks (FSDP2): each rank holds a share of each layer's, and has all of one layer's while it computes it.

    forward      layer ─all-gather─► computes ─► lets go of the others' weights          root: embeddings, norm, head
    backward     layer ─all-gather─► computes ─reduce-scatter─► this rank's share of the gradient, a mean over ranks

With `replicate` (HSDP) shares are of the ranks of one replica, and gradients are averaged over replicas too. With
`context` they are of data and context ranks together.
`fully_shard`'s root must be entered by its own forward: whatever calls layers by themselves does so `inside` it.

Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from services.policies.training.layout import Layout
from services.wire.errors import UsageError
from trainer.parallel.ranks import Ranks
from trainer.parallel.tensor import tensor_parallel

_ENTRY = "rollmesh_inside"
_Found = TypeVar("_Found")


def cut(model: PreTrainedModel, ranks: Ranks) -> None:
    """Cut the layers of `model` on tensor ranks, where there are several; all hold the same weights before.

    Before passes of it are tried, and before `shard`. Raises UsageError for a family that cannot be cut so.
    """
    if ranks.mesh is not None and ranks.layout.tensor > 1:
        tensor_parallel(model, ranks.mesh["tensor"])


def shard(model: nn.Module, ranks: Ranks) -> None:
    """Spread the weights of `model` over `ranks`, which all hold the same ones; its parameters are DTensors from then on.

    Nothing where there is one rank. Make optimizers after it. Raises UsageError for an architecture whose layers are not
    known as such.
    """
    if ranks.mesh is None:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"trainer.parallel: {type(model).__name__} has no layers that weights could be sharded by", "use one rank"
        )
    mesh = _mesh(ranks.mesh, ranks.layout)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    setattr(model, _ENTRY, MethodType(_call, model))
    register_fsdp_forward_method(model, _ENTRY)


def _mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Context ranks hold shares too: each has a part of every gradient."""
    if layout.context == 1:
        return mesh["replicate", "data"] if layout.replicate > 1 else mesh["data"]
    shares = mesh["data", "context"]._flatten("data_context")
    # Flattened dimensions are found on the mesh that they are of.
    return mesh["replicate", "data_context"] if layout.replicate > 1 else shares


def inside(model: nn.Module, work: Callable[[], _Found]) -> _Found:
    """`work()`, which calls parts of `model` by themselves, as a forward pass of it. Tensors that it returns have gradients
    only where they stand in tuples, lists or dicts."""
    entry: Callable[[Callable[[], _Found]], _Found] | None = getattr(model, _ENTRY, None)
    return work() if entry is None else entry(work)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks; a collective of theirs where it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _call(_: nn.Module, work: Callable[[], _Found]) -> _Found:
    return work()
