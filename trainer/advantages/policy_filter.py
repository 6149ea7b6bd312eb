"""PF-PPO: only siblings whose rewards are reliable are trained on (Zhang et al. 2024, arXiv:2409.06957, section 4):

    best              the one of the highest reward
    best_worst        it, and the one of the lowest
    best_random       it, and one of the others, drawn at random

The draw depends on the run's seed and the group's ordinal alone: a restarted trainer makes it again.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from trainer.advantages.scored import BoolArray, Float64Array

Keep = Literal["all", "best", "best_random", "best_worst"]


def kept(rewards: Float64Array, keep: Keep, seed: int, ordinal: int) -> BoolArray:
    """bool `[n]`: which of one group's trajectories are trained on. Among equals the first is best, and the last worst."""
    if keep == "all" or len(rewards) < 2:
        return np.ones(len(rewards), dtype=np.bool_)
    stays = np.zeros(len(rewards), dtype=np.bool_)
    best = int(rewards.argmax())
    stays[best] = True
    others = np.delete(np.arange(len(rewards)), best)
    if keep == "best_worst":
        stays[others[len(others) - 1 - int(rewards[others][::-1].argmin())]] = True
    elif keep == "best_random":
        stays[np.random.default_rng([seed, ordinal]).choice(others)] = True
    return stays
