"""What the trainer tells of itself in Redis, a line a step at most, for whoever looks at the run from outside."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from services.run_keys import RunKeys


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's last steps. Staleness in optimizer steps, of the last step's tokens."""

    step: int
    steps: int
    """How many the run makes."""
    k: int
    at: float
    """Unix seconds, at the end of `step`."""
    busy_share: float
    """Of the last steps' wall time, what the training thread did not spend waiting for a batch."""
    over_steps: int
    """How many steps that is of."""
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    masked_fraction: float
    effective_samples: float | None
    dropped: dict[str, int]
    """Trajectories of the whole run that will never be trained, by cause."""


async def post_report(redis: Redis, run_id: str, report: TrainerReport) -> None:
    """Raises RedisError."""
    await redis.set(RunKeys(run_id).trainer_report, msgspec.json.encode(report))


async def read_report(redis: Redis, run_id: str) -> TrainerReport | None:
    """None before the first step. Raises RedisError."""
    found = await redis.get(RunKeys(run_id).trainer_report)
    return None if found is None else msgspec.json.decode(found, type=TrainerReport)
