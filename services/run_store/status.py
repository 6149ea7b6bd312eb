"""Run status in Redis: the wait board (what each blocked component waits for, since when), the trainer's last steps, and
evaluations, which whoever plays the task tells."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.host.files import write_whole, writing
from services.policies.training.evaluation import evaluation_of
from services.run_store.client import as_text
from services.run_store.keys import RunKeys
from services.wire.rollout_api import Evaluation, EvaluationAnswers, Evaluations
from services.wire.run_metrics import TaskOutcome

_log = structlog.get_logger()


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    waiting_for: str
    since: float
    """Unix seconds."""


class WaitBoard:
    """Posts a component's waits in Redis, where the live view and the dashboard read them.

    Nothing here raises: nobody ends because a wait cannot be shown. One line in the log says that it could not.
    """

    def __init__(self, redis: Redis, run_id: str, component: str) -> None:
        self._redis = redis
        self._key = RunKeys(run_id).waits
        self._component = component
        self._failing = False

    async def post(self, waiting_for: str) -> bool:
        """Whether it stands on the board."""
        wait = Wait(waiting_for=waiting_for, since=time.time())
        _log.info("waiting", waiting_for=waiting_for)
        return await self._write(self._redis.hset(self._key, self._component, msgspec.json.encode(wait)))

    async def clear(self) -> bool:
        """Whether it is gone from the board."""
        return await self._write(self._redis.hdel(self._key, self._component))

    async def _write(self, writing: Awaitable[object]) -> bool:
        try:
            await writing
        except (RedisError, OSError) as error:
            if not self._failing:
                _log.warning("the wait board cannot be written", component=self._component, why=str(error))
            self._failing = True
            return False
        self._failing = False
        return True

    @asynccontextmanager
    async def waiting(self, waiting_for: str) -> AsyncIterator[None]:
        """Post for the time of the block."""
        await self.post(waiting_for)
        try:
            yield
        finally:
            await self.clear()


async def read_waits(redis: Redis, run_id: str) -> dict[str, Wait]:
    """Component → what it waits for now."""
    posted = await redis.hgetall(RunKeys(run_id).waits)
    return {as_text(component): msgspec.json.decode(wait, type=Wait) for component, wait in posted.items()}


class TrainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's last steps, for `rollmesh status`; published at most once a step.

    Staleness in optimizer steps, of the last step's tokens.
    """

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
    warnings: dict[str, str] = {}
    """Signs at the last step that the run cannot learn, by kind, in words."""
    tasks: dict[str, TaskOutcome] = {}
    """Each task by itself, over the last `over_steps` steps."""


async def post_trainer_status(redis: Redis, run_id: str, status: TrainerStatus) -> None:
    """Raises RedisError."""
    await redis.set(RunKeys(run_id).trainer_status, msgspec.json.encode(status))


async def read_trainer_status(redis: Redis, run_id: str) -> TrainerStatus | None:
    """None before the first step. Raises RedisError."""
    found = await redis.get(RunKeys(run_id).trainer_status)
    return None if found is None else msgspec.json.decode(found, type=TrainerStatus)


class EvaluationStore:
    """The evaluations of one run. All calls raise RedisError."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis, self._key = redis, RunKeys(run_id).evaluations

    async def keep(self, told: EvaluationAnswers) -> None:
        """One version has one evaluation: the first that was told."""
        await self._redis.hsetnx(self._key, str(told.due), evaluation_of(told).model_dump_json())

    async def read(self) -> list[Evaluation]:
        """In the order of their versions; one that cannot be read is left out, with a line in the log."""
        found = []
        for due, text in (await self._redis.hgetall(self._key)).items():
            try:
                found.append(Evaluation.model_validate_json(text))
            except ValidationError as error:
                _log.warning("an evaluation cannot be read", due=due, errors=error.error_count())
        return sorted(found, key=lambda evaluation: evaluation.due)


def write_evaluations(file: Path, evaluations: Sequence[Evaluation]) -> None:
    """Keep them in a run folder's evaluations.json."""
    with writing(file):
        write_whole(file, Evaluations(evaluations=list(evaluations)).model_dump_json(indent=2).encode() + b"\n")
