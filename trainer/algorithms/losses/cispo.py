"""CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5): the ratio is bounded, the gradient of no token is lost.

    ℓ_t = −sg(clip(r_t, 1 − low, 1 + high)) · A_t · log π(x_t)         r_t = π(x_t) / π_anchor(x_t), sg: no gradient

The paper runs without a lower bound: `clip_low = 1`.
"""

from __future__ import annotations

from services.config.training.algorithm import RatioBounds
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss


def cispo(tokens: LossTokens, settings: RatioBounds) -> TokenLoss:
    """See the module's docstring. `clipped`: where the weight is bounded; the gradient stays."""
    ratio = tokens.log_ratio().detach().exp()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, weight != ratio)
