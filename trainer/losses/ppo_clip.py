"""The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7), with bounds of its own on each side
(Yu et al. 2025, DAPO, arXiv:2503.14476, section 3.1):

    ℓ_t = −min(r_t·A_t, clip(r_t, 1 − low, 1 + high)·A_t)         r_t = π(x_t) / π_anchor(x_t)

Where the clip binds, the token's gradient is 0: it has been pushed far enough from the anchor.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST_LOG_RATIO = 20.0


def ppo_clip(logprobs: Tensor, anchor: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Per-token loss and whether the clip binds.

    `logprobs`, `anchor`: float `[B, W]`, anchor without gradient; `advantages`: `[B, 1]` or `[B, W]`.
    Both results are `[B, W]`, the second bool.
    """
    # Beyond e^±20 a float32 ratio overflows sooner or later, and 0 · ∞ in the backward pass would poison every weight.
    ratio = (logprobs - anchor).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(free, clipped), clipped < free
