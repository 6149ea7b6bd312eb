"""What came of the trajectory stream since somebody last asked: for the line of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Arrivals:
    """What came of the stream in some time. `tokens`: sampled ones of the `trajectories` that were fit to be trained.

    `dropped`: trajectories by cause, unfit ones and their siblings.
    """

    trajectories: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    """Spent on entries, not on waiting for them."""
