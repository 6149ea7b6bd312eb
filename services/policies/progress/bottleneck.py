"""What bounds a run's speed, and the remedy. Pure.

| the trainer waits | engines generate | groups wait for admission | bound by    | remedy                                |
|-------------------|------------------|---------------------------|-------------|---------------------------------------|
| often             | mostly           | mostly                    | generation  | servers; K, for larger engine batches |
| often             | mostly           | seldom                    | generation  | servers                               |
| often             | seldom           | mostly                    | staleness   | K: engines idle until the next commit |
| often             | seldom           | seldom                    | environment | its tools and rewards                 |
| hardly ever       |                  |                           | trainer     | ranks; of publishing, another way     |
| between           |                  |                           | nothing     | none: both sides are busy             |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BoundKind = Literal["generation", "staleness", "environment", "training", "publishing", "nothing"]

OFTEN, HARDLY, MOSTLY = 0.25, 0.1, 0.5
FEWEST_STEPS = 3
"""With fewer nothing is said: the first steps wait for the start."""
FEWEST_LOOKS = 4


@dataclass(frozen=True)
class Load:
    """Over the last `steps` steps, as shares of their time: `waited` for a batch, `published` weights. Over the last
    `looks` at the engines, as shares of those: `generating` anything, `held_back` groups that waited for admission."""

    steps: int
    waited: float
    published: float
    looks: int
    generating: float
    held_back: float
    k: int


@dataclass(frozen=True)
class Bound:
    """`remedy`: what would make the run faster; empty where nothing bounds it."""

    kind: BoundKind
    why: str
    remedy: str

    def __str__(self) -> str:
        """What stands behind "bound by"."""
        return f"{self.kind}: {self.remedy} ({self.why})" if self.remedy else f"{self.kind} ({self.why})"


def find_bound(load: Load) -> Bound | None:
    """What bounds the run; None before that can be said."""
    if load.steps < FEWEST_STEPS or load.looks < FEWEST_LOOKS:
        return None
    waits = f"the trainer waits {load.waited:.0%} of the time"
    if load.waited < HARDLY:
        if load.published >= MOSTLY:
            why = f"publishing weights takes {load.published:.0%} of the time"
            return Bound("publishing", why, "trainer.minibatches_per_batch: only the last is published")
        return Bound("training", waits, "add trainer ranks (trainer.parallel.data) or threads")
    if load.waited < OFTEN:
        return Bound("nothing", waits, "")
    busy, held = load.generating >= MOSTLY, load.held_back >= MOSTLY
    more = f"raise k to {_larger(load.k)}"
    if busy:
        servers = "add servers" + (f", or {more}" if held else "")
        return Bound("generation", f"{waits}, and engines generate", servers)
    if held:
        return Bound("staleness", f"{waits} while engines idle until the next commit", more)
    return Bound("environment", f"{waits}, and engines idle", "speed up the environment, its tools and rewards")


def _larger(k: int) -> int:
    return max(1, 2 * k)
