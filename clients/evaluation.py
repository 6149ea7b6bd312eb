"""Evaluation: held-out problems, answered greedily, before the first training group and after the run has concluded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog
from pydantic import BaseModel

from clients.environment import Environment, Problem
from clients.play import Played, play_group
from clients.repeating import ServerUnreachableError
from clients.server_pool import ServerPool
from services.wire.errors import NotFoundError, NotReadyError
from services.wire.rollout_api import FinishGroup, OpenGroup, SamplingBody

_log = structlog.get_logger()
GROUP_SIZE = 32
ATTEMPTS = 5


class Measured(BaseModel):
    """`success`: fraction of problems solved. `mean_length`: sampled tokens an episode, all its turns together."""

    success: float
    mean_length: float


class EvaluationReport(BaseModel):
    """`evaluation.json` in the run folder."""

    success_before: float
    success_after: float
    mean_length_before: float
    mean_length_after: float
    problems: int


async def evaluate(
    pool: ServerPool, environment: Environment, *, seed: int, problems: int, max_tokens: int
) -> Measured:
    """Answer held-out problems 0 … `problems` − 1 greedily, all at once."""
    held_out = [environment.problem("held_out", index, seed) for index in range(problems)]
    groups = [held_out[first : first + GROUP_SIZE] for first in range(0, problems, GROUP_SIZE)]
    played = await asyncio.gather(*(_play(pool, environment, group, max_tokens) for group in groups))
    episodes = [episode for group in played for episode in group]
    return Measured(
        success=sum(episode.ended.success for episode in episodes) / problems,
        mean_length=sum(episode.tokens for episode in episodes) / problems,
    )


async def _play(pool: ServerPool, environment: Environment, problems: list[Problem], max_tokens: int) -> list[Played]:
    sampling = SamplingBody(max_tokens=max_tokens, temperature=0.0)
    opening = OpenGroup(
        task=environment.name, group_size=len(problems), sampling=sampling, purpose="evaluate", wait_s=20.0
    )
    for attempt in range(ATTEMPTS):
        client = await pool.choose()
        try:
            group = await client.open_group(opening)
            played = await play_group(client, environment, group, problems, count_tokens=True)
            await client.finish_group(group.group_id, FinishGroup(rewards=[episode.as_reward() for episode in played]))
            return played
        except (ServerUnreachableError, NotReadyError, NotFoundError) as error:
            # An evaluation group is never published, so it can be played again from its beginning.
            pool.set_aside(client, str(error))
            if attempt + 1 == ATTEMPTS:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


class EvaluationRecord:
    """Keeps the measurement before training on disk, so that a restarted runner does not take a trained policy for it."""

    def __init__(self, run_dir: Path) -> None:
        self._before = run_dir / "evaluation_before.json"
        self._report = run_dir / "evaluation.json"

    def read_before(self) -> Measured | None:
        if not self._before.exists():
            return None
        return Measured.model_validate_json(self._before.read_text(encoding="utf-8"))

    def write_before(self, before: Measured) -> None:
        _write_whole(self._before, before)

    def write_report(self, before: Measured, after: Measured, problems: int) -> None:
        report = EvaluationReport(
            success_before=before.success,
            success_after=after.success,
            mean_length_before=before.mean_length,
            mean_length_after=after.mean_length,
            problems=problems,
        )
        _write_whole(self._report, report)
        self._before.unlink(missing_ok=True)


def _write_whole(path: Path, model: BaseModel) -> None:
    """All of the file or none of it: whoever reads it must never see a half."""
    partial = path.with_suffix(".partial")
    partial.write_text(model.model_dump_json(indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
