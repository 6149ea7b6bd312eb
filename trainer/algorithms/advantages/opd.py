"""On-policy distillation: the reverse KL from a teacher, one sampled token at a time (Gu et al. 2023, MiniLLM,
arXiv:2306.08543; Agarwal et al. 2024, GKD, arXiv:2306.13649, with the policy's own answers alone and the reverse KL):

    δ_t = log π_beh(x_t) − log π_T(x_t)           its mean over what π_beh samples is KL(π_beh ‖ π_T) at t
    A_t = −c · Σ_{u ≥ t} γ^(u−t) δ_u              γ = 0: −c · δ_t

Rewards are not read. With another estimator the same term is added to its advantage (`trainer.advantage.distil`).
"""

from __future__ import annotations

import numpy as np

from services.config.training.algorithm import DistillationSettings
from trainer.algorithms.advantages.batch import Float64Array, Int64Array, RewardBatch, TokenAdvantages, discounted_sums
from trainer.algorithms.losses.tokens import LARGEST_LOG_RATIO


def opd(reward_batch: RewardBatch, settings: DistillationSettings) -> TokenAdvantages:
    """See the module's docstring."""
    behaviour, teacher = (reward_batch.column(name).astype(np.float64, copy=False) for name in ("behaviour", "teacher"))
    return TokenAdvantages(teacher_term(behaviour, teacher, reward_batch.lengths, settings))


def teacher_term(
    behaviour: Float64Array, teacher: Float64Array, lengths: Int64Array, settings: DistillationSettings
) -> Float64Array:
    """`[N]`: −c · Σ γ^(u−t) δ_u at each sampled token. `behaviour`, `teacher`: logprobs `[N]`; `lengths` `[T]`: sampled
    tokens of each trajectory. δ is bounded to ±20: a token that the teacher never says must not drown all others.
    """
    gaps = np.clip(behaviour - teacher, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if settings.distil_discount:
        gaps = discounted_sums(gaps, lengths, settings.distil_discount)
    return -settings.distil_coefficient * gaps
