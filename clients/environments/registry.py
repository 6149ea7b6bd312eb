"""Environments by the name of their task (`services.wire.tasks.name`); a library is imported when its task is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from clients.environments.base import AgentEnvironment, AnyEnvironment, Dialect, Environment, needs_chat
from clients.environments.tasks.guess_number import GuessNumber
from clients.environments.tasks.running_sums import RunningSums
from clients.environments.tasks.sums import Sums
from services.wire.errors import UsageError
from services.wire.tasks.name import BUILT_IN as TASKS
from services.wire.tasks.name import LIBRARIES, TaskName, parse_task

if TYPE_CHECKING:
    from clients.environments.rewards import RewardsAddress

__all__ = ["TASKS", "Task", "make_environment", "make_task"]


@dataclass(frozen=True)
class Task:
    """An environment, and its `dialect` where the environment does not fix it. `assumed`: nobody has chosen that one."""

    environment: AnyEnvironment
    dialect: Dialect
    assumed: bool = False


def make_task(text: str, rewards: RewardsAddress | None = None, called: str | None = None) -> Task:
    """The task of this name. `rewards`: who judges the answers of tasks that do not do so themselves, and `called` how they
    hear of it, None for the environment's own name.

    Raises UsageError: with the nearest known name for one that does not exist, with what to install for a library that is
    missing, with what the library says of options it does not take.
    """
    name = parse_task(text)
    if name.built_in:
        return Task(make_environment(name.kind), "text" if name.demonstrated else "chat")
    options = dict(name.options)
    chosen = options.pop("dialect", None)
    dialect = _dialect(name, chosen)
    try:
        environment = _make(name, options, rewards, called)
        if dialect == "text" and needs_chat(environment):
            raise UsageError(f"prompts of task {text!r} are chat messages", "leave dialect=text out")
        speaks = dialect == "text" and not isinstance(environment, AgentEnvironment)
        return Task(environment, dialect, assumed=speaks and chosen is None)
    except ModuleNotFoundError as error:
        library = LIBRARIES[name.kind]
        if library.module is None or error.name is None or error.name.partition(".")[0] != library.module:
            raise UsageError(
                f"task {text!r} needs the module {error.name}, which is not installed",
                "install its package, whose name may be another, into this environment: `./dev install PACKAGE` in a "
                "checkout",
            ) from error
        raise UsageError(f"task {text!r} needs {library.module}, which is not installed", library.extra) from error


def make_environment(name: str) -> Environment:
    """An environment of our own. Raises UsageError, with the nearest known name, for any other."""
    match name:
        case RunningSums.name:
            return RunningSums()
        case GuessNumber.name:
            return GuessNumber()
        case Sums.name:
            return Sums()
        case _:
            parse_task(name)
            raise UsageError(f"task {name!r} is not built in", f"built in: {', '.join(TASKS)}")


def _make(
    name: TaskName, options: dict[str, str], rewards: RewardsAddress | None, called: str | None
) -> AnyEnvironment:
    match name.kind:
        case "reasoning-gym":
            from clients.environments.adapters.reasoning_gym import ReasoningGym

            return ReasoningGym(name.rest, options)
        case "textarena":
            from clients.environments.adapters.textarena import textarena_environment

            return textarena_environment(name.rest, options)
        case "prompts":
            from clients.environments.adapters.prompts import Prompts

            return Prompts(called or name.called or name.kind, Path(name.rest), options, rewards)
        case "verifiers":
            from clients.environments.adapters.verifiers import VerifiersEnvironment

            return VerifiersEnvironment.make(name.rest, options)
        case _:
            from clients.environments.adapters.python import load_environment

            return load_environment(name, options)


def _dialect(name: TaskName, wanted: str | None) -> Dialect:
    """A user's own Environment uses plain text by default."""
    for dialect in get_args(Dialect):
        if wanted == dialect:
            return dialect  # type: ignore[no-any-return]
    if wanted is not None:
        raise UsageError(f"no dialect {wanted!r}", f"known: {', '.join(get_args(Dialect))}")
    return "text" if name.kind == "python" else "auto"
