"""The plain policy gradient (Williams 1992, REINFORCE):

    ℓ_t = −A_t · log π(x_t)

Right for tokens of the current policy only; with stale ones it collapses unless a correction weighs it.
"""

from __future__ import annotations

from services.config.base import Section
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss


def policy_gradient(tokens: LossTokens, settings: Section) -> TokenLoss:
    del settings
    return TokenLoss(-tokens.advantages * tokens.logprobs)
