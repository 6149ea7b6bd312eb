"""Evaluations as a run holds them."""

from __future__ import annotations

from services.wire.rollout_api import Evaluation


def evaluation(due: int, success: float = 0.5, at: float = 0.0) -> Evaluation:
    return Evaluation(
        due=due,
        first_version=due,
        last_version=due,
        task="t",
        problems=4,
        samples=1,
        temperature=0.0,
        success=success,
        low=0.0,
        high=1.0,
        pass_at={1: success},
        mean_length=1.0,
        seconds=1.0,
        at=at,
    )
