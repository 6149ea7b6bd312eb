"""Stall of a weight update: how long it holds up token generation. The rule of engines and benchmarks.

    tokens   |   |   |   |   |       |   |   |   |        gaps between tokens, or between steps that sampled some
    commit                      ^                         falls into one gap (a pause: into one or more)
    window                 └───────────┘                  WINDOW gaps before, those it falls into, WINDOW after
    quiet    └─────────────┘           └─────────┘        the undisturbed gaps next to it

**stall** = the longest gap of the window less the median undisturbed gap, at least 0. The window is narrow: the prefill of
requests that come while others decode makes long gaps of its own, and a wide window would count them as the
commit's. Only gaps next to the update are compared with, for steps grow longer with every token of their context.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

WINDOW = 1
QUIET = 16
"""Undisturbed gaps that are looked at on each side of an update; twice as many before it, where no later ones are known."""


def stall(window: Sequence[float], undisturbed: Sequence[float]) -> float:
    """In the gaps' own unit, for any. Raises ValueError when either holds no gap."""
    if not window or not undisturbed:
        raise ValueError(f"a stall needs gaps: {len(window)} around the update, {len(undisturbed)} undisturbed ones")
    return max(0.0, max(window) - median(undisturbed))
