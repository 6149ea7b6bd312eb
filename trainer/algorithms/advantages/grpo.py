"""GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2), and Dr. GRPO without the division (Liu et al. 2025,
arXiv:2503.20783, section 3.2):

    A_i = (R_i − mean(R)) / (std(R) + ε)          over the group, std with n − 1, ε = 1e-4
    A_i =  R_i − mean(R)                          std = false
"""

from __future__ import annotations

import numpy as np

from services.config.training.algorithm import GrpoSettings
from trainer.algorithms.advantages.batch import Float64Array, RewardBatch, TokenAdvantages

EPSILON = 1e-4


def grpo(reward_batch: RewardBatch, settings: GrpoSettings) -> TokenAdvantages:
    """See the module's docstring: the same at every token of a trajectory."""
    return TokenAdvantages(
        reward_batch.spread(reward_batch.by_size(lambda rewards: group_relative(rewards, std=settings.std)))
    )


def group_relative(rewards: Float64Array, *, std: bool = True) -> Float64Array:
    """Advantages `[…, n]` of groups of `n` trajectories. Exactly 0 for all of a group when all its rewards are equal.

    Raises ValueError for groups of one: they have nothing to be compared with.
    """
    if rewards.shape[-1] < 2:
        raise ValueError(f"a group of {rewards.shape[-1]} has no siblings to compare")
    gaps: Float64Array = rewards - rewards.mean(-1, keepdims=True)
    found = gaps / (rewards.std(-1, ddof=1, keepdims=True) + EPSILON) if std else gaps
    # Rounding of the mean would leave crumbs, and a group without a signal must be exactly skippable.
    return np.where((rewards == rewards[..., :1]).all(-1, keepdims=True), 0.0, found)
