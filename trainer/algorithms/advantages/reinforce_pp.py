"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, section 3): no critic, and a normalisation over the whole batch.

A_t = Σ_{u ≥ t} γ^(u−t) r_u                         reinforce_pp: what is still earned from the token on
A_t = R_i − mean(R over the group)                  reinforce_pp_baseline
then  (A_t − mean(A)) / (std(A) + 1e-8)             over all tokens of the batch, std with n − 1
"""

from __future__ import annotations

from services.config.algorithm import AdvantageSettings
from trainer.algorithms.advantages.batch import Scored, TokenAdvantages
from trainer.algorithms.advantages.grpo import group_relative


def reinforce_pp(scored: Scored, settings: AdvantageSettings) -> TokenAdvantages:
    """See the module's docstring."""
    return TokenAdvantages(scored.normalised(scored.sums_to_the_end(scored.rewards, settings.discount)))


def reinforce_pp_baseline(scored: Scored, settings: AdvantageSettings) -> TokenAdvantages:
    """See the module's docstring. Raises ValueError for a group of one."""
    del settings
    gaps = scored.by_group(lambda rewards: group_relative(rewards, std=False))
    return TokenAdvantages(scored.normalised(scored.spread(gaps)))
