"""The proximal policy without a forward pass (Li et al. 2025, A-3PO, arXiv:2512.06547, section 3): between the policy that
drew a token, d steps ago, and the one that the step makes, on a straight line of logprobs:

    log π_prox ≈ log π_beh + α·(log π − log π_beh)         α = d / (d + 1), without gradient
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def interpolated(logprobs: Tensor, behaviour: Tensor, staleness: Tensor) -> Tensor:
    """Logprobs of the approximated policy. `staleness`: optimizer steps between the token's policy and the step's start."""
    share = staleness / (staleness + 1)
    return behaviour + share * (logprobs - behaviour)
