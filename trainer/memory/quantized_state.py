"""AdamW whose moments are kept in 8 bits (`trainer.optimizer.state_bits = 8`), by the library torchao.

    moment, float32  ◄── code of 8 bits a value, × one float32 scale for 256 values      before the step
                     ──► of the whole step, rounded to the nearest code                   after it

Codes follow Dettmers et al. 2022, arXiv:2110.02861, section 2.1. Weights below 4096 values, and those whose number of
values 256 does not divide, keep float32 moments. A quantized moment is a tensor made of others (codes, scale, qmap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from services.wire.errors import UsageError

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(Optimizer):
    """AdamW by the formula of torch's own, but for the rounding of what it keeps."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        """`groups` say their `weight_decay`. Raises UsageError where torchao is not installed."""
        # Takes seconds to import, and only these runs need it.
        try:
            from torchao.optim import AdamW8bit as Torchaos
        except ModuleNotFoundError as error:
            raise UsageError(
                "trainer.optimizer.state_bits=8 needs torchao, which is not installed",
                "pip install 'rollmesh[adam8bit]'",
            ) from error
        self._inner: Optimizer = Torchaos(groups, lr=lr, betas=betas, eps=eps)
        for group in self._inner.param_groups:
            group["lr"] = lr
        super().__init__(self._inner.param_groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. `closure` is refused: the gradient is there already."""
        if closure is not None:
            raise ValueError("compute the gradient before the step")
        # torchao compiles the step of each shape, and wants the rate as a tensor. On a CPU that costs more than it saves.
        self._inner.param_groups = [{**group, "lr": torch.tensor(group["lr"])} for group in self.param_groups]
        self._inner.state = self.state
        weights = [weight for group in self.param_groups for weight in group["params"]]
        with torch.compiler.set_stance("default" if any(weight.is_cuda for weight in weights) else "force_eager"):
            self._inner.step()


def mapped(tensor: Tensor, change: Callable[..., Tensor], *others: Tensor | None) -> Tensor:
    """`change` of a tensor, or of each tensor that a quantized one is made of; `others` (or None) go with it, alike."""
    if not is_traceable_wrapper_subclass(tensor):
        return change(tensor, *others)
    names, context = tensor.__tensor_flatten__()
    parts = {
        name: change(getattr(tensor, name), *(None if other is None else getattr(other, name) for other in others))
        for name in names
    }
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def plain(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A weight's state as plain tensors: a quantized `exp_avg` becomes `exp_avg.codes`, `exp_avg.scale`, `exp_avg.qmap`."""
    found: dict[str, Tensor] = {}
    for name, tensor in fields.items():
        if is_traceable_wrapper_subclass(tensor):
            found |= {f"{name}.{part}": getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}
        else:
            found[name] = tensor
    return found


def quantized(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `plain`, over the same memory."""
    found = {name: tensor for name, tensor in fields.items() if "." not in name}
    for name in dict.fromkeys(name.partition(".")[0] for name in fields if "." in name):
        from torchao.optim.subclass_8bit import OptimState8bit

        codes, scale, qmap = (fields[f"{name}.{part}"] for part in OptimState8bit.tensor_attrs)
        found[name] = OptimState8bit(codes, scale, qmap, _SIGNED[name], torch.float32)
    return found
