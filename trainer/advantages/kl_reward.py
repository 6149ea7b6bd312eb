"""The divergence from a reference as a part of the reward (Ziegler et al. 2019, arXiv:1909.08593, section 2; Ouyang et al.
2022, arXiv:2203.02155, equation 2):

    r_t = reward_t − β · D_t          D_t: k1, k2 or k3 (`trainer.losses.divergence`) at a token that the policy drew

The token was drawn by the engine's policy, so that it is its logprob that is compared: no forward pass but the reference's.
"""

from __future__ import annotations

import numpy as np
import torch

from trainer.advantages.scored import Float64Array
from trainer.losses.divergence import Estimator, divergence


def divergences(behaviour: Float64Array, reference: Float64Array, estimator: Estimator) -> Float64Array:
    """D `[N]` of logprobs `[N]`. 0 where both say that the token could not be drawn: they do not differ there."""
    found = divergence(torch.from_numpy(behaviour), torch.from_numpy(reference), estimator)
    known: Float64Array = np.nan_to_num(found.numpy(), nan=0.0)
    return known
