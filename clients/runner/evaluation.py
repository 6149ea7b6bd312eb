"""Evaluation: held-out problems, answered before the first training group and after the run has concluded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import structlog
from pydantic import BaseModel

from clients.environments.base import AnyEnvironment, Ended, Problem
from clients.rollout.server_pool import ServerPool
from clients.rollout.transport import ServerUnreachableError
from clients.runner.agent_episodes import EpisodeLimits, Lost, open_group
from clients.runner.failures import GroupLostError
from clients.runner.groups import evaluate_group
from clients.runner.text_episodes import Played
from services.wire.errors import CapacityError, ConflictError, NotReadyError
from services.wire.rollout_api import OpenGroup, SamplingBody
from services.wire.run_metrics import EvaluationReport

_log = structlog.get_logger()
GROUP_SIZE = 32
ATTEMPTS = 5


class Measured(BaseModel):
    """`success`: fraction of problems solved. `mean_length`: sampled tokens an episode, all its turns together."""

    success: float
    mean_length: float


async def evaluate(
    pool: ServerPool,
    environment: AnyEnvironment,
    *,
    seed: int,
    problems: int,
    max_tokens: int,
    limits: EpisodeLimits,
    temperature: float = 0.0,
    runner_id: str | None = None,
    groups_at_once: int = 64,
) -> Measured:
    """Answer held-out problems 0 … `problems` − 1, greedily at temperature 0.

    An agent's episode that is lost counts as not solved.
    """
    held_out = [environment.problem("held_out", index, seed) for index in range(problems)]
    groups = [held_out[first : first + GROUP_SIZE] for first in range(0, problems, GROUP_SIZE)]
    sampling = SamplingBody(max_tokens=max_tokens, temperature=temperature)
    room = asyncio.Semaphore(groups_at_once)

    async def play(group: list[Problem]) -> list[Played]:
        async with room:
            return await _play(pool, environment, group, sampling, limits, runner_id)

    async with asyncio.TaskGroup() as playing:
        tasks = [playing.create_task(play(group)) for group in groups]
    episodes = [episode for task in tasks for episode in task.result()]
    return Measured(
        success=sum(episode.ended.success for episode in episodes) / problems,
        mean_length=sum(episode.tokens for episode in episodes) / problems,
    )


async def _play(
    pool: ServerPool,
    environment: AnyEnvironment,
    problems: list[Problem],
    sampling: SamplingBody,
    limits: EpisodeLimits,
    runner_id: str | None,
) -> list[Played]:
    """An evaluation group is never published, so it can be played again from its beginning when its server is lost."""
    opening = OpenGroup(
        task=environment.name,
        group_size=len(problems),
        sampling=sampling,
        purpose="evaluate",
        wait_s=20.0,
        runner=runner_id,
    )
    for attempt in range(ATTEMPTS):
        client = await pool.choose()
        try:
            group = await open_group(client, opening)
            played = await evaluate_group(client, environment, group, problems, sampling, limits)
        except (ServerUnreachableError, NotReadyError, CapacityError, ConflictError, GroupLostError) as error:
            if attempt + 1 == ATTEMPTS or (isinstance(error, GroupLostError) and error.cause == "environment"):
                raise
            pool.set_aside(client, str(error))
            continue
        if attempt + 1 < ATTEMPTS and any(isinstance(one, Lost) and one.cause == "server" for one in played):
            pool.set_aside(client, "it was lost in an evaluation")
            continue
        return [_unsolved(one) if isinstance(one, Lost) else one for one in played]
    raise AssertionError("unreachable: the last attempt returns or raises")


def _unsolved(lost: Lost) -> Played:
    _log.warning("episode lost in an evaluation, counted as not solved", cause=lost.cause, why=lost.why)
    return Played(lost.session_id, Ended(reward=0.0, success=False), 0)


class EvaluationRecord:
    """Keeps the measurement before training on disk, so that a restarted runner does not repeat it too late."""

    def __init__(self, run_dir: Path) -> None:
        self._before = run_dir / "evaluation_before.json"
        self._report = run_dir / "evaluation.json"

    def read_before(self) -> Measured | None:
        if not self._before.exists():
            return None
        return Measured.model_validate_json(self._before.read_text(encoding="utf-8"))

    def write_before(self, before: Measured) -> None:
        _write_whole(self._before, before.model_dump_json(indent=2).encode())

    def write_report(self, before: Measured, after: Measured, problems: int) -> None:
        report = EvaluationReport(
            success_before=before.success,
            success_after=after.success,
            mean_length_before=before.mean_length,
            mean_length_after=after.mean_length,
            problems=problems,
        )
        _write_whole(self._report, msgspec.json.format(msgspec.json.encode(report), indent=2))
        self._before.unlink(missing_ok=True)


def _write_whole(path: Path, content: bytes) -> None:
    """Write atomically: a reader never sees a partial file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content + b"\n")
    partial.replace(path)
