"""Advantages: how much better a trajectory did than its siblings.

GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.1):

    A_i = (R_i − mean(R)) / (std(R) + ε)          over the group, std with n − 1, ε = 1e-4
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-4


def grpo(rewards: Sequence[float]) -> list[float]:
    """Advantages of one group's trajectories, in their order. Exactly 0 for all when all rewards are equal.

    Raises ValueError for a group of one: it has nothing to be compared with.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no siblings to compare")
    if min(rewards) == max(rewards):
        # Rounding of the mean would leave crumbs, and a group without a signal must be exactly skippable.
        return [0.0] * len(rewards)
    values = np.asarray(rewards, dtype=np.float64)
    return list(((values - values.mean()) / (values.std(ddof=1) + EPSILON)).tolist())
