"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), with bounds of its own on each side
(Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.1) and, if asked, a bound below for bad tokens that have become likely
(Ye et al. 2020, dual clip, arXiv:1912.09729, equation 5):

    ℓ_t = −min(r_t·A_t, clip(r_t, 1 − low, 1 + high)·A_t)         r_t = π(x_t) / π_anchor(x_t)
    ℓ_t = −max(min(…), c·A_t)                                     where A_t < 0, with dual clip c > 1

Where a bound binds, the token's gradient is 0: it has been pushed far enough from the anchor.
"""

from __future__ import annotations

import torch

from services.config.training.algorithm import PpoClipSettings
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss


def ppo_clip(tokens: LossTokens, settings: PpoClipSettings) -> TokenLoss:
    ratio, advantages = tokens.log_ratio().exp(), tokens.advantages
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages
    gain, bound = torch.minimum(free, clipped), clipped < free
    if settings.dual_clip is not None:
        floor = settings.dual_clip * advantages
        below = (advantages < 0) & (gain < floor)
        gain, bound = torch.where(below, floor, gain), bound | below
    return TokenLoss(-gain, bound)
