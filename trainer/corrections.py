"""Corrections for tokens that another policy drew: weights on the per-token loss, without gradient.

    none           1
    truncated_is   min(π_prox(x_t) / π_beh(x_t), C)       truncated importance sampling: Espeholt et al. 2018 (IMPALA,
                                                          arXiv:1802.01561, section 4.1), per token

π_prox is the trainer's policy before the step, π_beh the engine's that drew the token. The cap bounds the variance.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def truncated_is(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Weights of `proximal` and `behaviour` logprobs, same shape."""
    return (proximal - behaviour).exp().clamp(max=cap)
