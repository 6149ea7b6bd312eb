"""Evaluations of a run in Redis: told by whoever plays its task, read by the trainer, `rollmesh status` and the summary."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog
from pydantic import ValidationError
from redis.asyncio import Redis

from services.policies.training.evaluation import interval, ks_of, pass_at, success_of
from services.run_store.keys import RunKeys
from services.wire.rollout_api import Evaluation, EvaluationAnswers, TaskEvaluation
from services.wire.run_metrics import EvaluationPoint

_log = structlog.get_logger()


def evaluation_of(told: EvaluationAnswers) -> Evaluation:
    """What the answers say."""
    return Evaluation(
        **told.model_dump(exclude={"solved", "tasks", "mean_length"}),
        **_found(told.solved, told.samples, told.mean_length).model_dump(),
        tasks={each.task: _found(each.solved, told.samples, each.mean_length) for each in told.tasks},
    )


def _found(solved: Sequence[int], samples: int, mean_length: float) -> TaskEvaluation:
    within = interval(solved, samples)
    return TaskEvaluation(
        problems=len(solved),
        success=success_of(solved, samples),
        low=within.low,
        high=within.high,
        pass_at={k: pass_at(solved, samples, k) for k in ks_of(samples)},
        mean_length=mean_length,
    )


def point_of(evaluation: Evaluation) -> EvaluationPoint:
    """What status and summary show of it."""
    return msgspec.convert(evaluation, EvaluationPoint, from_attributes=True)


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
