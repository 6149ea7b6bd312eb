"""Evaluation: held-out problems, answered before the first training group, beside training, and once it has concluded.

    the served version reaches a multiple of `every` ──► its problems are answered, behind all training ──► told to the run
                   └── comes to the next one meanwhile: that is left out

Answers that are sampled have seeds of their own, so that one version gives the same answers each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from clients.environments.base import AnyEnvironment, Ended, Problem, different
from clients.rollout.client import RolloutClient
from clients.rollout.server_pool import ServerPool
from clients.rollout.transport import ServerUnreachableError
from clients.runner.agent_episodes import EpisodeLimits, Lost, open_group
from clients.runner.failures import GroupLostError
from clients.runner.files import write_whole
from clients.runner.groups import evaluate_group
from clients.runner.measured import Measured, added, as_told, commonest_of, known_sum, shown_of, together
from clients.runner.tasks import TaskInPlay
from clients.runner.text_episodes import Played
from services.wire.errors import CapacityError, ConflictError, NotReadyError, RollmeshError
from services.wire.rollout_api import (
    LONGEST_WHY,
    EvaluationAnswers,
    OpenGroup,
    SamplingBody,
)
from services.wire.run_metrics import EvaluationReport, TaskReport, WorkProgress

_log = structlog.get_logger()
GROUP_SIZE = 32
ATTEMPTS = 5
_ASK_WITHIN_S = 1.0
_GROUPS_AT_ONCE = 64
_SHOWN = 4


@dataclass(frozen=True)
class Terms:
    """How often and how a policy is evaluated. `every`: versions between two, 0 for never beside training."""

    problems: int
    temperature: float = 0.0
    samples: int = 1
    every: int = 0


async def evaluate_all(
    pool: ServerPool,
    tasks: Sequence[TaskInPlay],
    terms: Terms,
    *,
    seed: int,
    runner_id: str | None,
    sessions_at_once: int,
    answered: Callable[[int], None] = lambda _: None,
    every_answer: bool = False,
) -> Measured:
    """Answer the held-out problems of all tasks, at the same time. As `evaluate`."""
    room = asyncio.Semaphore(max(1, sessions_at_once // GROUP_SIZE))
    async with asyncio.TaskGroup() as measuring:
        running = [
            measuring.create_task(
                evaluate(
                    pool,
                    each.environment,
                    task=each.label,
                    seed=seed,
                    problems=each.held_out(terms.problems),
                    max_tokens=each.task.max_tokens,
                    temperature=terms.temperature,
                    samples=terms.samples,
                    limits=each.limits,
                    runner_id=runner_id,
                    room=room,
                    answered=answered,
                    every_answer=every_answer,
                )
            )
            for each in tasks
        ]
    return together([each.result() for each in running])


async def evaluate(
    pool: ServerPool,
    environment: AnyEnvironment,
    *,
    seed: int,
    problems: int,
    max_tokens: int,
    limits: EpisodeLimits,
    task: str | None = None,
    temperature: float = 0.0,
    samples: int = 1,
    runner_id: str | None = None,
    room: asyncio.Semaphore | None = None,
    answered: Callable[[int], None] = lambda _: None,
    every_answer: bool = False,
) -> Measured:
    """Answer held-out problems 0 … `problems` − 1, `samples` times each, greedily at temperature 0.

    `task`: what it is called, None for the environment's name; `room`: for groups at once; `answered`: is told of so many
    more answers; `every_answer`: agents' last answers are all asked for, a call each, and not those that are shown alone.
    An agent's episode that is lost counts as not solved.
    """
    name = task or environment.name
    room = room or asyncio.Semaphore(_GROUPS_AT_ONCE)
    held_out = [environment.problem("held_out", index, seed) for index in range(problems)]
    firsts = range(0, problems, GROUP_SIZE)
    began: list[int] = []

    async def play(first: int, sample: int) -> list[Played]:
        chosen = SamplingBody(
            max_tokens=max_tokens, temperature=temperature, seed=_seed(temperature, seed, sample, first)
        )
        async with room:
            group = held_out[first : first + GROUP_SIZE]
            opening = OpenGroup(
                task=name,
                group_size=len(group),
                sampling=chosen,
                purpose="evaluate",
                wait_s=20.0,
                runner=runner_id,
            )
            shown = len(group) if every_answer else _SHOWN if first == sample == 0 else 0
            played = await _play(pool, environment, group, opening, limits, began.append, shown)
        answered(len(group))
        return played

    async with asyncio.TaskGroup() as playing:
        tasks = [playing.create_task(play(first, sample)) for sample in range(samples) for first in firsts]
    played = [task.result() for task in tasks]
    solved = [0] * problems
    rewards: list[list[float]] = [[] for _ in range(problems)]
    for number, episodes in enumerate(played):
        first = firsts[number % len(firsts)]
        for place, episode in enumerate(episodes):
            solved[first + place] += bool(episode.ended.success)
            rewards[first + place].append(episode.ended.reward)
    answers = problems * samples
    lost = [episode.lost for episodes in played for episode in episodes if episode.lost]
    texts = [episode.last.answer for episodes in played for episode in episodes if episode.last is not None]
    return Measured(
        task=name,
        success=sum(solved) / answers,
        mean_length=sum(episode.tokens for episodes in played for episode in episodes) / answers,
        solved=solved,
        first_version=min(began),
        last_version=max([*began, *await _served(pool)]),
        samples=samples,
        cut_off=known_sum(episode.cut_off for episodes in played for episode in episodes),
        equal_rewards=None if samples == 1 else sum(len(set(of_problem)) == 1 for of_problem in rewards),
        lost=len(lost),
        lost_why=lost[0][:LONGEST_WHY] if lost else "",
        different=different(held_out),
        mean_reward=sum(map(sum, rewards)) / answers,
        # Of some of the answers it would say nothing.
        commonest=commonest_of(texts) if len(texts) + len(lost) == answers else None,
        components=added(
            {name: (value, 1) for name, value in episode.ended.components.items()}
            for episodes in played
            for episode in episodes
        ),
        shown=[shown_of(episode.last, episode.ended) for episode in played[0][:_SHOWN] if episode.last is not None],
    )


def _seed(temperature: float, seed: int, sample: int, first: int) -> int | None:
    """Of the group whose first problem is number `first`; the sessions behind its first have seeds that follow it. Each
    answer has another, or all would be drawn alike. None where nothing is drawn."""
    return None if temperature == 0.0 else ((seed + 1) * 1_000_003 + sample) * 1_000_003 % (1 << 62) + first


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
    opening: OpenGroup,
    limits: EpisodeLimits,
    began: Callable[[int], None],
    shown: int,
) -> list[Played]:
    """Episodes in the order of `problems`. `began`: is told the version that served the group's opening. `shown`: of so
    many of them the last turn is told.

    An evaluation group is never published, so it can be played again from its beginning when its server is lost.
    """
    sampling = opening.sampling
    assert sampling is not None
    for attempt in range(ATTEMPTS):
        client = await pool.choose()
        try:
            group = await open_group(client, opening)
            began(group.policy_version)
            played = await evaluate_group(client, environment, group, problems, sampling, limits, shown=shown)
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
    return Played(lost.session_id, Ended(reward=0.0, success=False), 0, lost=lost.why)


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

    def __init__(self, pool: ServerPool, terms: Terms, measure: Callable[[], Awaitable[Measured]]) -> None:
        self._pool, self._terms, self._measure = pool, terms, measure
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
            # Answers of a run can be read among its rollouts: the run's Redis need not hold them.
            kept = measured.model_copy(update={"shown": [], "commonest": None})
            told = as_told(kept, self._terms.temperature, version, began)
            await (await self._pool.choose()).tell_evaluation(told)
        except RollmeshError as error:
            _log.warning("an evaluation is left out", version=version, why=str(error))
            return
        _log.info(
            "evaluated",
            when=f"version {version}",
            versions=f"{measured.first_version} to {measured.last_version}",
            **measured.in_words(),
        )


class EvaluationRecord:
    """Keeps the measurement before training on disk, so that a restarted runner does not repeat it too late."""

    def __init__(self, run_dir: Path) -> None:
        self._before = run_dir / "evaluation_before.json"
        self._report = run_dir / "evaluation.json"
        self._progress = run_dir / "progress.json"

    def write_progress(self, what: str, done: int, total: int) -> None:
        """How far the evaluation is, for who watches the run."""
        # It is for looking at: runners that share the folder may be in each other's way, and nothing depends on it.
        with suppress(OSError):
            write_whole(self._progress, msgspec.json.encode(WorkProgress(what=what, done=done, total=total)))

    def read_before(self) -> Measured | None:
        if not self._before.exists():
            return None
        return Measured.model_validate_json(self._before.read_text(encoding="utf-8"))

    def write_before(self, before: Measured) -> None:
        write_whole(self._before, before.model_dump_json(indent=2).encode())

    def write_alone(self, told: EvaluationAnswers) -> None:
        """Where nothing is trained."""
        write_whole(self._report, told.model_dump_json(indent=2).encode())

    def write_report(self, before: Measured, after: Measured, samples: int) -> None:
        report = EvaluationReport(
            success_before=before.success,
            success_after=after.success,
            mean_length_before=before.mean_length,
            mean_length_after=after.mean_length,
            problems=len(after.solved),
            solved_before=before.solved,
            solved_after=after.solved,
            samples=samples,
            different=after.different,
            tasks=_reports(before, after),
        )
        write_whole(self._report, msgspec.json.format(msgspec.json.encode(report), indent=2))
        self._before.unlink(missing_ok=True)


def _reports(before: Measured, after: Measured) -> dict[str, TaskReport]:
    earlier = {each.task: each for each in before.tasks}
    return {
        each.task: TaskReport(
            mean_length_before=earlier[each.task].mean_length,
            mean_length_after=each.mean_length,
            solved_before=earlier[each.task].solved,
            solved_after=each.solved,
        )
        for each in after.tasks
        if each.task in earlier
    }
