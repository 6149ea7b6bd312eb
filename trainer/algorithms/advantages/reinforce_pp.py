"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, section 3): no critic, and a normalisation over the whole batch.

A_t = Σ_{u ≥ t} γ^(u−t) r_u                         reinforce_pp: what is still earned from the token on
A_t = R_i − mean(R over the group)                  reinforce_pp_baseline
then  (A_t − mean(A)) / (std(A) + 1e-8)             over all tokens of the batch, std with n − 1
"""

from __future__ import annotations

from services.config.base import Section
from services.config.training.algorithm import ReinforcePpSettings
from trainer.algorithms.advantages.batch import RewardBatch, TokenAdvantages
from trainer.algorithms.advantages.grpo import group_relative


def reinforce_pp(reward_batch: RewardBatch, settings: ReinforcePpSettings) -> TokenAdvantages:
    return TokenAdvantages(
        reward_batch.normalised(reward_batch.sums_to_the_end(reward_batch.rewards, settings.discount))
    )


def reinforce_pp_baseline(reward_batch: RewardBatch, settings: Section) -> TokenAdvantages:
    """See the module's docstring. Raises ValueError for a group of one."""
    del settings
    gaps = reward_batch.by_size(lambda rewards: group_relative(rewards, std=False))
    return TokenAdvantages(reward_batch.normalised(reward_batch.spread(gaps)))
