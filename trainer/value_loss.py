"""The critic's loss (PPO, Schulman et al. 2017, arXiv:1707.06347, equation 9, with the bound of its authors' code):

    ℓ_t = ½ · max( (V_t − R_t)², (clip(V_t, V_old,t − ε, V_old,t + ε) − R_t)² )

V_old: the value before the batch, so that the bound binds from the second optimizer step on a batch on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Per token; all `[N]`, `values` with gradient."""
    bounded = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (bounded - returns).square())
