"""RLOO, REINFORCE leave-one-out (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; Ahmadian et al.
2024, arXiv:2402.14740, section 2.2):

    A_i = R_i − (1/(n − 1)) Σ_{j ≠ i} R_j          over the group
"""

from __future__ import annotations

import numpy as np

from services.config.base import Section
from trainer.algorithms.advantages.batch import Float64Array, RewardBatch, TokenAdvantages


def rloo(reward_batch: RewardBatch, settings: Section) -> TokenAdvantages:
    """See the module's docstring: the same at every token of a trajectory."""
    del settings
    return TokenAdvantages(reward_batch.spread(reward_batch.by_size(leave_one_out)))


def leave_one_out(rewards: Float64Array) -> Float64Array:
    """Advantages `[…, n]` of groups of `n`. Exactly 0 where all rewards of one are equal. Raises ValueError for groups of
    one."""
    n = rewards.shape[-1]
    if n < 2:
        raise ValueError(f"a group of {n} has no siblings to compare")
    others: Float64Array = (rewards.sum(-1, keepdims=True) - rewards) / (n - 1)
    return np.where((rewards == rewards[..., :1]).all(-1, keepdims=True), 0.0, rewards - others)
