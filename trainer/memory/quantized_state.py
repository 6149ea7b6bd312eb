"""AdamW whose moments are kept in 8 bits (`trainer.optimizer.state_bits = 8`), by the library bitsandbytes.

    moment, float32  ◄── code of 8 bits a value, × one float32 scale for 256 values      before the step
                     ──► of the whole step, rounded to the nearest code                   after it

Codes follow Dettmers et al. 2022, arXiv:2110.02861, section 2.1. Weights below 4096 values keep float32 moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from services.wire.errors import UsageError
from services.wire.extras import install

_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""What codes mean, the same for all weights: the library keeps them with each weight's state, we with none."""


class AdamW8bit(Optimizer):
    """AdamW by the formula of torch's own, but for the rounding of what it keeps.

    A weight's state: `state1`, `state2` (codes, uint8; float32 where the weight is small), `absmax1`, `absmax2` (scales),
    `step`.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        """`groups` say their `weight_decay`. Raises UsageError where bitsandbytes is not installed."""
        # Takes seconds to import, and only these runs need it.
        try:
            from bitsandbytes.optim import AdamW
        except ModuleNotFoundError as error:
            raise UsageError(
                "trainer.optimizer.state_bits=8 needs bitsandbytes, which is not installed",
                install("adam8bit"),
            ) from error
        self._inner = AdamW(groups, lr=lr, betas=betas, eps=eps, optim_bits=8)
        self._inner.fill_qmap()
        super().__init__(self._inner.param_groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. `closure` is refused: the gradient is there already."""
        if closure is not None:
            raise ValueError("compute the gradient before the step")
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        self._inner.param_groups = self.param_groups
        self._inner.state = defaultdict(dict, {each: self._told(each) for each in weights if self.state.get(each)})
        self._inner.step()
        for weight in weights:
            kept = dict(self._inner.state[weight])
            self.state[weight] = {
                "step": torch.tensor(float(kept.pop("step"))),
                **{name: tensor for name, tensor in kept.items() if name not in _TABLES},
            }
        # The library would keep what was brought to the device for this step (`trainer.memory.host_state`) until the next.
        self._inner.state = defaultdict(dict)

    def _told(self, weight: Tensor) -> dict[str, Any]:
        """The state of `weight` as the library wants it."""
        state = self.state[weight]
        tables = _TABLES if state["state1"].dtype == torch.uint8 else {}
        known = {name: self._inner.name2qmap[table].to(weight.device) for name, table in tables.items()}
        return {**state, "step": int(state["step"]), **known}
