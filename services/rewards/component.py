"""Interface of a reward component: takes samples, gives each a value or a failure, in its own time."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.policies.rewards import Failure
from services.rewards.sandbox.protocol import Sample

Score = float | Failure
"""Finite, or why there is none."""


class Scorer(Protocol):
    """One component. Cancelling a future that `submit` returned gives its sample up."""

    @property
    def full(self) -> bool:
        """Whether it takes no more samples now."""
        ...

    @property
    def not_confined(self) -> list[str]:
        """Limits that cannot be enforced here, in words; known once it is ready."""
        ...

    def not_ready(self) -> list[str]:
        """Why it cannot score yet; empty when it can."""
        ...

    def submit(self, sample: Sample) -> asyncio.Future[Score]:
        """Take a sample; not to be called while `full`."""
        ...

    async def run(self) -> None:
        """Score until cancelled. Raises UsageError where that can never be."""
        ...


def settle(future: asyncio.Future[Score], score: Score) -> None:
    """Give a score to whoever still waits for it."""
    if not future.done():
        future.set_result(score)
