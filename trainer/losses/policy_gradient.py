"""The plain policy gradient (Williams 1992, REINFORCE):

    ℓ_t = −A_t · log π(x_t)

Right for tokens of the current policy only; with stale ones it collapses unless a correction weighs it.
"""

from __future__ import annotations

from torch import Tensor


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Per-token loss `[B, W]` of `logprobs` `[B, W]` and `advantages` `[B, 1]` or `[B, W]`."""
    return -advantages * logprobs
