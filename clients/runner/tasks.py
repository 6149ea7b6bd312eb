"""The tasks of a run as the runner plays them: one, or several in a mixture.

    group.ordinal ──drawn──► task, its problem number ──► Drawn(task, problem)
    owed (a group was lost) ──────────────────────────► the same once more, in a group of that task

Which task and which of its problems a group plays follows from the run's seed and the group's ordinal, so that a runner
that starts again goes on, and several runners share one order. In a task with a curriculum, its problem follows from what
was measured so far instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from clients.environments.base import AgentEnvironment, AnyEnvironment, Dialect, FiniteEnvironment, Problem
from clients.rollout.client import RolloutClient
from clients.runner.agent_episodes import EpisodeLimits
from clients.runner.curricula import Curricula
from clients.runner.groups import in_dialect
from clients.runner.text_episodes import NOTHING, Played
from services.policies.training.mixture import draw
from services.wire.errors import UsageError
from services.wire.rollout_api import MixedTask, Mixture, OpenGroup, SamplingBody

ADMISSION_WAIT_S = 20.0


@dataclass(frozen=True)
class PlayedTask:
    """What to play, and within which limits. `name`: what the run calls it, empty for the environment's own name.

    `assumed`: nobody has chosen the dialect, which is text. `parts`: of all tasks' parts, so many groups are of this task.
    `max_tokens`: an answer. `episode_timeout_s`: from an episode's first call to its reward.
    """

    environment: AnyEnvironment
    max_tokens: int
    temperature: float = 1.0
    dialect: Dialect = "text"
    assumed: bool = False
    name: str = ""
    parts: int = 1
    episode_timeout_s: float = 600.0

    @property
    def label(self) -> str:
        return self.name or self.environment.name


@dataclass(frozen=True)
class TaskInPlay:
    """A task with its `environment` as it is played. `limits`: of its episodes."""

    task: PlayedTask
    environment: AnyEnvironment
    limits: EpisodeLimits

    @property
    def label(self) -> str:
        return self.task.label

    def held_out(self, wanted: int) -> int:
        """How many held-out problems there are to be answered, of those that are wanted."""
        source = self.task.environment
        if not isinstance(source, FiniteEnvironment):
            return wanted
        # Where there is none, asking for one says what is to be done.
        return min(wanted, max(1, source.count("held_out")))


@dataclass(frozen=True)
class Drawn:
    """A problem of a task. `attempt`: how often its group was lost before."""

    task: int
    problem: Problem
    attempt: int = 0

    def again(self) -> Drawn:
        return Drawn(self.task, self.problem, self.attempt + 1)


class Tasks:
    """The tasks of a run. `runner`: who plays them."""

    def __init__(
        self,
        tasks: Sequence[TaskInPlay],
        curricula: Curricula,
        seed: int,
        group_size: int,
        runner: str,
        *,
        greedy_baseline: bool = False,
    ) -> None:
        self.all, self.curricula = tasks, curricula
        self._seed = seed
        self._parts = tuple(each.task.parts for each in tasks)
        shared = {
            "group_size": group_size,
            "wait_s": ADMISSION_WAIT_S,
            "greedy_baseline": greedy_baseline,
            "runner": runner,
        }
        sampling = [SamplingBody(max_tokens=each.task.max_tokens, temperature=each.task.temperature) for each in tasks]
        self._of_one = [
            OpenGroup(task=each.label, sampling=chosen, **shared) for each, chosen in zip(tasks, sampling, strict=True)
        ]
        mixed = [
            MixedTask(task=each.label, parts=each.task.parts, sampling=chosen)
            for each, chosen in zip(tasks, sampling, strict=True)
        ]
        self._of_any = (
            self._of_one[0] if len(tasks) == 1 else OpenGroup(mixture=Mixture(seed=seed, tasks=mixed), **shared)
        )

    @property
    def any_agent(self) -> bool:
        return any(isinstance(each.environment, AgentEnvironment) for each in self.all)

    def opening(self, owed: Drawn | None) -> OpenGroup:
        """How the next group is asked for: of the owed problem's task, or of whichever task its ordinal says."""
        return self._of_any if owed is None else self._of_one[owed.task]

    def drawn(self, ordinal: int) -> Drawn:
        """What the group with this ordinal plays, where nothing is owed."""
        found = draw(self._parts, self._seed, ordinal)
        problem = self.curricula.draw(found.task)
        if problem is None:
            problem = self.all[found.task].environment.problem("train", found.place, self._seed)
        return Drawn(found.task, problem)

    def noted(self, task: int) -> Mapping[str, float]:
        """What is recorded beside rewards of the task."""
        curriculum = self.curricula.of(task)
        return NOTHING if curriculum is None else curriculum.noted

    def played(self, drawn: Drawn, played: Sequence[Played]) -> None:
        """A group came to its end."""
        solved = sum(episode.ended.success for episode in played)
        self.curricula.played(drawn.task, drawn.problem.index, solved, len(played))

    def sampling(self, task: int) -> SamplingBody:
        chosen = self._of_one[task].sampling
        assert chosen is not None
        return chosen


@asynccontextmanager
async def entered(
    tasks: Sequence[PlayedTask], client: RolloutClient, heartbeat_s: float
) -> AsyncIterator[list[TaskInPlay]]:
    """The tasks ready to be played; what their environments hold is given back behind the block."""
    check_names(tasks)
    async with AsyncExitStack() as stack:
        for each in tasks:
            if isinstance(each.environment, AbstractAsyncContextManager):
                await stack.enter_async_context(each.environment)
        yield [
            TaskInPlay(
                each,
                await in_dialect(client, each.environment, each.dialect, assumed=each.assumed),
                EpisodeLimits(each.episode_timeout_s, heartbeat_s),
            )
            for each in tasks
        ]


def check_names(tasks: Sequence[PlayedTask]) -> None:
    """Raises UsageError for two tasks of one name: nothing could tell their figures apart."""
    seen: set[str] = set()
    for each in tasks:
        if each.label in seen:
            raise UsageError(f"two tasks are named {each.label!r}", "give one of them a name")
        seen.add(each.label)
