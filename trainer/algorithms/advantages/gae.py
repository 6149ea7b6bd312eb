"""Generalised advantage estimation with a critic (Schulman et al. 2015, arXiv:1506.02438, equations 12 and 16):

    δ_t = r_t + γ V_{t+1} − V_t                    V_t: the value before token t; 0 behind the last token
    A_t = Σ_{l ≥ 0} (γλ)^l δ_{t+l}                 return_t = A_t + V_t, what the critic learns
    then  (A_t − mean(A)) / (std(A) + 1e-8)        whiten = true: over all tokens of the batch, std with n − 1

With a λ of its own the critic learns Σ (γλ_c)^l δ_{t+l} + V_t (decoupled GAE: Yuan et al. 2025, VC-PPO, arXiv:2503.01491;
λ_c = 1 is what was earned). The advantage's may be of a trajectory's length, λ = max(0, 1 − 1/(α·l)), so that a reward at
the end of l tokens reaches the first ones (VAPO, Yue et al. 2025, arXiv:2504.05118, section 4.2).

Tokens that the environment wrote are no actions: the value behind a token is that before the next sampled one.
"""

from __future__ import annotations

import numpy as np

from services.config.training.algorithm import AdvantageSettings
from trainer.algorithms.advantages.batch import Float64Array, RewardBatch, TokenAdvantages


def gae(reward_batch: RewardBatch, settings: AdvantageSettings) -> TokenAdvantages:
    """See the module's docstring. Raises ValueError without a critic's values."""
    values = reward_batch.values
    if len(values) != len(reward_batch.rewards):
        raise ValueError(f"{len(values)} values for {len(reward_batch.rewards)} tokens: gae needs a critic")
    behind = np.append(values[1:], 0.0)[: len(values)]
    behind[np.append(np.diff(reward_batch.trajectory) != 0, True)[: len(values)]] = 0.0
    errors = reward_batch.rewards + settings.discount * behind - values
    advantages = reward_batch.sums_to_the_end(errors, settings.discount * traces(reward_batch, settings))
    of_critic = settings.critic.trace
    goals = advantages if of_critic is None else reward_batch.sums_to_the_end(errors, settings.discount * of_critic)
    returns = goals + values
    return TokenAdvantages(reward_batch.normalised(advantages) if settings.whiten else advantages, returns)


def traces(reward_batch: RewardBatch, settings: AdvantageSettings) -> Float64Array:
    """`[T]`: the λ of each trajectory's advantages."""
    alpha, lengths = settings.trace_alpha, reward_batch.lengths
    if alpha is None:
        return np.full(len(lengths), settings.trace)
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(lengths, 1)))
