"""A soft fine for answers that are too long (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13):

0                                   |y| ≤ L − C             |y| sampled tokens, L: overlong_length, C: overlong_buffer
((L − C) − |y|) / C                 L − C < |y| ≤ L
−1                                  L < |y|
"""

from __future__ import annotations

from services.config.algorithm import AdvantageSettings


def overlong_fine(tokens: int, settings: AdvantageSettings) -> float:
    """What is added to the reward of a trajectory of so many sampled tokens, −1 … 0; 0 without an `overlong_length`."""
    if settings.overlong_length is None:
        return 0.0
    expected = settings.overlong_length - settings.overlong_buffer
    return max(-1.0, min(0.0, (expected - tokens) / settings.overlong_buffer))
