"""ReMax (Li et al. 2023, arXiv:2310.10505, section 4.1): the baseline is the reward of a greedy answer.

A_i = R_i − R_greedy          the greedy sibling itself is never trained
"""

from __future__ import annotations

import numpy as np

from services.config.base import Section
from trainer.algorithms.advantages.batch import RewardBatch, TokenAdvantages


def remax(reward_batch: RewardBatch, settings: Section) -> TokenAdvantages:
    """See the module's docstring. Raises ValueError for a group that has not exactly one greedy sibling."""
    del settings
    baselines = np.zeros(int(reward_batch.group.max(initial=-1)) + 1)
    found = np.bincount(reward_batch.group[reward_batch.greedy], minlength=len(baselines))
    if bool((found != 1).any()):
        raise ValueError(f"group number {int((found != 1).argmax())} has not one greedy sibling to compare with")
    baselines[reward_batch.group[reward_batch.greedy]] = reward_batch.outcomes[reward_batch.greedy]
    return TokenAdvantages(reward_batch.spread(reward_batch.outcomes - baselines[reward_batch.group]))
