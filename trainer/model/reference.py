"""The reference: the policy that the run began with, against which a divergence is measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from trainer.data.packing import MicroBatch
from trainer.model.forward import PackedForward
from trainer.model.logprobs import sampled_terms


class Reference:
    """A frozen model of its own, or the policy under training, which is the first one again while `within` lasts."""

    def __init__(self, policy: PackedForward, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._policy = policy
        self.within = within
        """Around all passes: the adapters off, or the weights on the device."""

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> Tensor:
        """float32 `[N]`: of each fresh token, at the temperature that it was sampled with. Call it `within`."""
        return sampled_terms(self._policy, micro)[0][micro.chosen]
