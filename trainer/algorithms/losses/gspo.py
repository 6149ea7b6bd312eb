"""GSPO (Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7): one ratio for a whole segment, clipped as one.

    s_i = exp( (1/|y_i|) Σ_t log π(y_t)/π_anchor(y_t) )
    ℓ_t = −min(s_i·A_i, clip(s_i, 1 − low, 1 + high)·A_i)         the same for every token of segment i

y_i are the segment's tokens that may enter the loss: those over K are left out of the ratio too. The paper means over
segments: `loss.mean = segments`. Its bounds are narrow, 3e-4 and 4e-4: s_i is a mean of many tokens.
"""

from __future__ import annotations

import torch

from services.config.training.algorithm import RatioBounds
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss


def gspo(tokens: LossTokens, settings: RatioBounds) -> TokenLoss:
    ratio = tokens.mean_by_segment(tokens.log_ratio()).exp()[tokens.segment]
    free = ratio * tokens.advantages
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * tokens.advantages
    return TokenLoss(-torch.minimum(free, clipped), clipped < free)
