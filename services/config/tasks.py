"""Settings of what is played: the tasks of a run, and which of their problems."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from services.config.base import Section
from services.policies.training.curriculum import CurriculumRules
from services.policies.training.mixture import parts_of
from services.wire.errors import UsageError
from services.wire.tasks.name import parse_task


def _known_task(name: str) -> str:
    try:
        parse_task(name)
    except UsageError as error:
        raise ValueError(error.remedy) from error
    return name


TaskText = Annotated[str, AfterValidator(_known_task)]
TaskLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9:._-]{0,63}$")]


class TaskSettings(Section):
    """One of several tasks. What is None is as for all: `rollout.max_tokens`, `temperature`, `episode_timeout_s`."""

    task: TaskText
    name: TaskLabel | None = Field(default=None, description="What metrics call it; empty: what it calls itself")
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False, description="Its share of the groups, as a part")
    max_tokens: int | None = Field(default=None, ge=1, description="Longest answer, in tokens, a turn")
    temperature: float | None = Field(default=None, ge=0.01, le=2.0)
    episode_timeout_s: float | None = Field(default=None, gt=0.0, description="Longest time an episode may take")

    @property
    def called(self) -> str | None:
        """Its name in metrics; None where that is for the user's code to say."""
        return self.name or parse_task(self.task).called


class CurriculumSettings(Section):
    """Problems that were always or never solved rest for some passes. For tasks of so many problems and no more."""

    enabled: bool = Field(default=False, description="Whether problems that teach nothing are skipped for a while")
    agreeing: int = Field(
        default=1, ge=1, description="Times in a row that all siblings, or none, must have been right"
    )
    longest_rest: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="Passes that a problem is skipped for at the most; 1 at first, then twice as many",
    )
    least_share: float = Field(
        default=0.1, gt=0.0, le=1.0, description="Share of a task's problems that each pass has at the least"
    )

    @property
    def rules(self) -> CurriculumRules | None:
        """None where it is off."""
        return CurriculumRules(self.agreeing, self.longest_rest, self.least_share) if self.enabled else None


def _a_mixture(tasks: list[TaskSettings]) -> list[TaskSettings]:
    if tasks:
        parts_of([each.weight for each in tasks])
    twice = [name for name, count in Counter(each.called for each in tasks if each.called).items() if count > 1]
    if twice:
        raise ValueError(f"two tasks are named {twice[0]!r}: give one of them a name")
    return tasks


TaskList = Annotated[list[TaskSettings], AfterValidator(_a_mixture)]
