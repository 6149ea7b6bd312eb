"""Gradients over ranks: the norm of one whose parts are on ranks of several meshes, and its bound; and what is to become of
a gradient on its way to a module's own weights.

‖g‖² = Σ over tensors ‖g_i‖²        ‖g_i‖² = Σ over the ranks that hold parts of it; what ranks hold copies of counts once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> Tensor:
    """Scale the gradients of `parameters` so that their norm is at most `most`; returns what it was, float32 scalar.

    Whatever meshes they are on; a plain tensor is the same on all ranks. Every rank calls this with the same parameters in
    the same order, and gets the same norm. Where all are plain it is torch's `clip_grad_norm_`, byte for byte.

    Raises ValueError for a gradient that is not summed yet.
    """
    every = list(parameters)
    gradients = [parameter.grad for parameter in every if parameter.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return torch.nn.utils.clip_grad_norm_(every, most)
    locals_, held = list[Tensor](), dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[int]]()
    for number, gradient in enumerate(gradients):
        held.setdefault(_holders(gradient), []).append(number)
        locals_.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    # Squares of norms that are large in float32 are beyond it.
    norms = [norm.double() for norm in torch._foreach_norm(locals_)]
    total = torch.zeros((), dtype=torch.float64, device=norms[0].device)
    for holders, numbers in held.items():
        squares = torch.stack([norms[number] for number in numbers]).square().sum()
        if holders is not None:
            mesh, dimensions = holders
            for dimension in dimensions:
                dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares
    norm = total.sqrt().float()
    torch._foreach_mul_(locals_, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _holders(gradient: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its dimensions whose ranks hold parts; None where each rank holds all."""
    if not isinstance(gradient, DTensor):
        return None
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is not summed over {gradient.device_mesh}: {gradient.placements}")
    cut = tuple(number for number, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, cut) if cut else None


def on_the_way(module: nn.Module, seen: Callable[[Tensor], Tensor]) -> None:
    """Whenever `module` is called with gradients, it computes with `seen(weight)` in place of each weight of its own.

    `seen` gives the same numbers, and does in its backward pass what is to be done to the gradient.
    """
    forward = module.forward

    def called(*arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        # Read here: while a sharded model computes, its weights are other objects.
        own = dict(module.named_parameters(recurse=False))
        module._parameters.update({name: seen(each) for name, each in own.items()})  # type: ignore[misc]
        try:
            return forward(*arguments, **keywords)
        finally:
            module._parameters.update(own)

    module.forward = called
