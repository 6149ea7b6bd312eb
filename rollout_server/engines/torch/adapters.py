"""Adapters that are published alone, in the torch engine: merged into the weights that it decodes with.

    stage    A, B ──► shadow ──► base + B·A ──► the weights' shadow        on the thread that stages
    flip     both change places with what is served                        between two steps

The sum is the one that the trainer would have published (`trainer.model.adapters`). A copy of the base's adapted layers is
kept: with the two sets of weights, three in all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weight_bus.manifest.adapter import AdapterPlan, a_name, adapted_modules, b_name
from weight_bus.receiver.buckets import throttle_beside
from weight_bus.receiver.receiver import WeightTarget


class MergedAdapters:
    """`weight_bus.receiver.receiver.WeightTarget` of A and B by their names, in the weights' dtype, over `weights`, which
    are the base's."""

    def __init__(self, weights: WeightTarget, plan: AdapterPlan) -> None:
        self._weights = weights
        live = weights.live()
        modules = adapted_modules({name: tuple(tensor.shape) for name, tensor in live.items()}, plan.targets)
        self._base = {module: live[f"{module}.weight"].clone() for module in modules}
        self._live, self._shadow = (self._empty(plan.rank) for _ in range(2))

    def live(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def shadow(self) -> Mapping[str, torch.Tensor]:
        return self._shadow

    @torch.no_grad()
    def merge(self, _: int) -> None:
        """A version's A and B are whole in the shadow: make the weights that they stand for."""
        into, throttle = self._weights.shadow(), throttle_beside(self._base.values())
        for module, base in self._base.items():
            first, second = self._shadow[b_name(module)].float(), self._shadow[a_name(module)].float()
            into[f"{module}.weight"].copy_(torch.addmm(base.float(), first, second))
            throttle.rest()

    def flip(self) -> None:
        self._weights.flip()
        self._live, self._shadow = self._shadow, self._live

    def flip_back(self) -> None:
        self._weights.flip_back()
        self._live, self._shadow = self._shadow, self._live

    def _empty(self, rank: int) -> dict[str, torch.Tensor]:
        """B of zeros: the base itself."""
        found: dict[str, torch.Tensor] = {}
        for module, base in self._base.items():
            rows, columns = base.shape
            found[a_name(module)] = base.new_zeros((rank, columns))
            found[b_name(module)] = base.new_zeros((rows, rank))
        return found
