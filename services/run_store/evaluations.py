"""Evaluations of a run in Redis: told by whoever plays its task, read by the trainer, `rollmesh status` and the summary."""

from __future__ import annotations

import structlog
from pydantic import ValidationError
from redis.asyncio import Redis

from services.policies.training.evaluation import interval, ks_of, pass_at, success_of
from services.run_store.keys import RunKeys
from services.wire.rollout_api import Evaluation, EvaluationAnswers
from services.wire.run_metrics import EvaluationPoint

_log = structlog.get_logger()


def evaluation_of(told: EvaluationAnswers) -> Evaluation:
    """What the answers say."""
    solved, samples = told.solved, told.samples
    within = interval(solved, samples)
    return Evaluation(
        **told.model_dump(exclude={"solved"}),
        problems=len(solved),
        success=success_of(solved, samples),
        low=within.low,
        high=within.high,
        pass_at={k: pass_at(solved, samples, k) for k in ks_of(samples)},
    )


def point_of(evaluation: Evaluation) -> EvaluationPoint:
    """What status and summary show of it."""
    return EvaluationPoint(**{name: getattr(evaluation, name) for name in EvaluationPoint.__struct_fields__})


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
