"""Evaluation: held-out problems, answered before the first training group, beside training, and once it has concluded.

    the served version reaches a multiple of `every` ──► its problems are answered, behind all training ──► told to the run
                   └── comes to the next one meanwhile: that is left out

Answers that are sampled have seeds of their own, so that one version gives the same answers each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from pydantic import BaseModel

from clients.environments.base import AnyEnvironment, Ended, Problem
from clients.rollout.client import RolloutClient
from clients.rollout.server_pool import ServerPool
from clients.rollout.transport import ServerUnreachableError
from clients.runner.agent_episodes import EpisodeLimits, Lost, open_group
from clients.runner.failures import GroupLostError
from clients.runner.groups import evaluate_group
from clients.runner.text_episodes import Played
from services.wire.errors import CapacityError, ConflictError, NotReadyError, RollmeshError
from services.wire.rollout_api import EvaluationAnswers, OpenGroup, SamplingBody
from services.wire.run_metrics import EvaluationReport

_log = structlog.get_logger()
GROUP_SIZE = 32
ATTEMPTS = 5
_ASK_WITHIN_S = 1.0


class Measured(BaseModel):
    """`solved`: right answers to each problem. `mean_length`: sampled tokens an episode, all its turns together.

    `success`: the share of answers that were right. `first_version` to `last_version` were served meanwhile.
    """

    success: float
    mean_length: float
    solved: list[int] = []
    first_version: int = 0
    last_version: int = 0


async def evaluate(
    pool: ServerPool,
    environment: AnyEnvironment,
    *,
    seed: int,
    problems: int,
    max_tokens: int,
    limits: EpisodeLimits,
    temperature: float = 0.0,
    samples: int = 1,
    runner_id: str | None = None,
    groups_at_once: int = 64,
) -> Measured:
    """Answer held-out problems 0 … `problems` − 1, `samples` times each, greedily at temperature 0.

    An agent's episode that is lost counts as not solved.
    """
    held_out = [environment.problem("held_out", index, seed) for index in range(problems)]
    firsts = range(0, problems, GROUP_SIZE)
    room = asyncio.Semaphore(groups_at_once)
    began: list[int] = []

    async def play(first: int, sample: int) -> list[Played]:
        chosen = SamplingBody(max_tokens=max_tokens, temperature=temperature, seed=_seed(temperature, seed, sample))
        async with room:
            group = held_out[first : first + GROUP_SIZE]
            return await _play(pool, environment, group, chosen, limits, runner_id, began.append)

    async with asyncio.TaskGroup() as playing:
        tasks = [playing.create_task(play(first, sample)) for sample in range(samples) for first in firsts]
    played = [task.result() for task in tasks]
    solved = [0] * problems
    for number, episodes in enumerate(played):
        first = firsts[number % len(firsts)]
        for place, episode in enumerate(episodes):
            solved[first + place] += bool(episode.ended.success)
    answers = problems * samples
    return Measured(
        success=sum(solved) / answers,
        mean_length=sum(episode.tokens for episodes in played for episode in episodes) / answers,
        solved=solved,
        first_version=min(began),
        last_version=max([*began, *await _served(pool)]),
    )


def _seed(temperature: float, seed: int, sample: int) -> int | None:
    """None where nothing is drawn."""
    return None if temperature == 0.0 else (seed + 1) * 1_000_003 + sample


async def _served(pool: ServerPool) -> list[int]:
    """What servers serve now; of those that cannot be asked nothing is known."""

    async def ask(client: RolloutClient) -> list[int]:
        try:
            return [(await client.run_state(patience_s=_ASK_WITHIN_S)).policy_version]
        except RollmeshError:
            return []

    return [version for versions in await asyncio.gather(*map(ask, pool.clients)) for version in versions]


async def _play(
    pool: ServerPool,
    environment: AnyEnvironment,
    problems: list[Problem],
    sampling: SamplingBody,
    limits: EpisodeLimits,
    runner_id: str | None,
    began: Callable[[int], None],
) -> list[Played]:
    """Episodes in the order of `problems`. `began`: is told the version that served the group's opening.

    An evaluation group is never published, so it can be played again from its beginning when its server is lost.
    """
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
            began(group.policy_version)
            played = await evaluate_group(client, environment, group, problems, sampling, limits)
        except (ServerUnreachableError, NotReadyError, CapacityError, ConflictError, GroupLostError) as error:
            if attempt + 1 == ATTEMPTS or (isinstance(error, GroupLostError) and error.cause == "environment"):
                raise
            pool.set_aside(client, str(error))
            continue
        if attempt + 1 < ATTEMPTS and any(isinstance(one, Lost) and one.cause == "server" for one in played):
            pool.set_aside(client, "it was lost in an evaluation")
            continue
        ended = [_unsolved(one) if isinstance(one, Lost) else one for one in played]
        return sorted(ended, key=lambda episode: group.session_ids.index(episode.session_id))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _unsolved(lost: Lost) -> Played:
    _log.warning("episode lost in an evaluation, counted as not solved", cause=lost.cause, why=lost.why)
    return Played(lost.session_id, Ended(reward=0.0, success=False), 0)


@dataclass(frozen=True)
class Terms:
    """How often and how a policy is evaluated. `every`: versions between two, 0 for never beside training."""

    problems: int
    temperature: float = 0.0
    samples: int = 1
    every: int = 0


def as_told(measured: Measured, task: str, terms: Terms, version: int, began: float) -> EvaluationAnswers:
    """What was measured of the version that was due. `began`: by the monotonic clock."""
    return EvaluationAnswers(
        due=version,
        task=task,
        samples=terms.samples,
        temperature=terms.temperature,
        seconds=time.monotonic() - began,
        at=time.time(),
        **measured.model_dump(exclude={"success"}),
    )


def due(every: int, served: int, evaluated: int | None) -> int | None:
    """The version to evaluate at, where version `served` is served; None where there is none to do, or `every` is 0.

    `evaluated`: the newest that was evaluated. Where several are overdue the older ones are left out.
    """
    if every <= 0:
        return None
    newest = served // every * every
    return newest if newest > (evaluated or 0) else None


class PeriodicEvaluation:
    """Evaluates beside training, one at a time, and tells the run. One that fails is logged and left out."""

    def __init__(self, pool: ServerPool, task: str, terms: Terms, measure: Callable[[], Awaitable[Measured]]) -> None:
        self._pool, self._task, self._terms, self._measure = pool, task, terms, measure
        self._newest = 0
        self._evaluated: int | None = None
        self._new = asyncio.Event()

    def serves(self, version: int) -> None:
        """A server serves `version`."""
        if version > self._newest:
            self._newest = version
            self._new.set()

    async def run(self) -> None:
        """Until cancelled."""
        if not self._terms.every:
            return
        # A runner before this one may have told some.
        known = await (await self._pool.choose()).evaluations()
        self._evaluated = max((each.due for each in known), default=None)
        while True:
            await self._new.wait()
            self._new.clear()
            version = due(self._terms.every, self._newest, self._evaluated)
            if version is not None:
                await self._evaluate(version)
                self._evaluated = version

    async def _evaluate(self, version: int) -> None:
        began = time.monotonic()
        try:
            measured = await self._measure()
            told = as_told(measured, self._task, self._terms, version, began)
            await (await self._pool.choose()).tell_evaluation(told)
        except RollmeshError as error:
            _log.warning("an evaluation is left out", version=version, why=str(error))
            return
        _log.info(
            "evaluated",
            when=f"version {version}",
            versions=f"{measured.first_version} to {measured.last_version}",
            success=measured.success,
            mean_length=measured.mean_length,
        )


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

    def write_alone(self, told: EvaluationAnswers) -> None:
        """Where nothing is trained."""
        _write_whole(self._report, told.model_dump_json(indent=2).encode())

    def write_report(self, before: Measured, after: Measured, problems: int, samples: int) -> None:
        report = EvaluationReport(
            success_before=before.success,
            success_after=after.success,
            mean_length_before=before.mean_length,
            mean_length_after=after.mean_length,
            problems=problems,
            solved_before=before.solved,
            solved_after=after.solved,
            samples=samples,
        )
        _write_whole(self._report, msgspec.json.format(msgspec.json.encode(report), indent=2))
        self._before.unlink(missing_ok=True)


def _write_whole(path: Path, content: bytes) -> None:
    """Write atomically: a reader never sees a partial file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content + b"\n")
    partial.replace(path)
