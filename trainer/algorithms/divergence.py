"""Estimates of the divergence of the policy from a reference, one sampled token at a time (Schulman 2020, "Approximating KL
divergence"; δ = log π − log π_ref at a token that π sampled):

    k1   δ                        unbiased, may be negative; its gradient alone has mean 0, so it belongs in the reward
    k2   δ²/2                     biased, its gradient is that of the divergence
    k3   exp(−δ) − 1 + δ          unbiased, never negative
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from trainer.algorithms.losses.tokens import LARGEST_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def divergence(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimate at each token; shapes are equal. `logprobs` may carry gradient."""
    delta = (logprobs - reference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2.0
    return (-delta).exp() - 1.0 + delta
