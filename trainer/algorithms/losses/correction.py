"""Corrections for tokens that another policy sampled: weights on the per-token loss, without gradient, and masks.

With ρ_t = π_prox(x_t) / π_beh(x_t), π_prox the trainer's policy before the step (with anchor = proximal: before the batch),
π_beh the engine's that sampled the token:

| setting            | what it does to a token                          | source                                          |
|--------------------|--------------------------------------------------|-------------------------------------------------|
| weight = token     | × min(ρ_t, cap), truncated importance sampling   | Espeholt et al. 2018, IMPALA, arXiv:1802.01561  |
| weight = sequence  | × min(Π_t ρ_t, cap) of its segment               | Precup et al. 2000, eligibility traces, eq. 2   |
| weight = geometric | × min((Π_t ρ_t)^(1/n), cap) of its segment       | the ratio of GSPO, arXiv:2507.18071, equation 7 |
| mask = …           | left out where that ratio is outside its bounds  | token: IcePop, arXiv:2510.18855                 |
| veto               | left out with its segment for one ρ_t < veto     | verl's rollout correction                       |

Weight and mask combine: IcePop is `weight = token, cap = inf, mask = token`. Masked tokens stay in the denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from services.config.training.algorithm import CorrectionSettings
from trainer.algorithms.losses.tokens import LARGEST_LOG_RATIO, LossTokens

Level = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def correction(tokens: LossTokens, settings: CorrectionSettings) -> tuple[Tensor | None, Tensor | None]:
    """Weights `[N]`, and which tokens stay, bool `[N]`; None for a part that is not asked for.

    A token whose ratio is no number (an infinite logprob on both sides) is left out where a mask or a veto is asked for.
    """
    log_ratio = tokens.proximal - tokens.behaviour
    weight = keep = None
    if settings.weight != "none":
        weight = _ratio(tokens, log_ratio, settings.weight).clamp(max=settings.cap)
    if settings.mask != "none":
        ratio = _ratio(tokens, log_ratio, settings.mask)
        keep = (ratio >= settings.mask_low) & (ratio <= settings.mask_high)
    if settings.veto is not None:
        bad = ~(log_ratio.exp() >= settings.veto)
        clean = (tokens.sum_by_segment(bad.to(log_ratio.dtype)) == 0)[tokens.segment]
        keep = clean if keep is None else keep & clean
    return weight, keep


def _ratio(tokens: LossTokens, log_ratio: Tensor, level: Level) -> Tensor:
    if level == "sequence":
        log_ratio = tokens.sum_by_segment(log_ratio)[tokens.segment]
    elif level == "geometric":
        log_ratio = tokens.mean_by_segment(log_ratio)[tokens.segment]
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
