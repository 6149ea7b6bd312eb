"""Generalised advantage estimation with a critic (Schulman et al. 2015, arXiv:1506.02438, equations 12 and 16):

    δ_t = r_t + γ V_{t+1} − V_t                    V_t: the value before token t; 0 behind the last token
    A_t = Σ_{l ≥ 0} (γλ)^l δ_{t+l}                 return_t = A_t + V_t, what the critic learns
    then  (A_t − mean(A)) / (std(A) + 1e-8)        whiten = true: over all tokens of the batch, std with n − 1

Tokens that the environment wrote are no actions: the value behind a token is that before the next sampled one.
"""

from __future__ import annotations

import numpy as np

from services.config.algorithm import GaeSettings
from trainer.algorithms.advantages.batch import RewardBatch, TokenAdvantages


def gae(reward_batch: RewardBatch, settings: GaeSettings) -> TokenAdvantages:
    """See the module's docstring. Raises ValueError without a critic's values."""
    values = reward_batch.values
    if len(values) != len(reward_batch.rewards):
        raise ValueError(f"{len(values)} values for {len(reward_batch.rewards)} tokens: gae needs a critic")
    behind = np.append(values[1:], 0.0)[: len(values)]
    behind[np.append(np.diff(reward_batch.trajectory) != 0, True)[: len(values)]] = 0.0
    errors = reward_batch.rewards + settings.discount * behind - values
    advantages = reward_batch.sums_to_the_end(errors, settings.discount * settings.trace)
    returns = advantages + values
    return TokenAdvantages(reward_batch.normalised(advantages) if settings.whiten else advantages, returns)
