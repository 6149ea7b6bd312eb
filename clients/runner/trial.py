"""A trial of a task without a policy: its problems are posed twice, a few episodes are played with answers of our own.

    problem(split, i, seed) twice ──► the same?        held-out ones ──► among the training ones?
    start, respond with nonsense and with the solution, twice ──► the same replies and rewards? which rewards? how fast?

Nothing here judges: `services.policies.diagnosis.environment` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TypeVar

import msgspec

from clients.environments.base import (
    Answer,
    AnyEnvironment,
    Dialect,
    Ended,
    Environment,
    NextTurn,
    Problem,
    Split,
    agent_of,
    describe,
    identity,
    needs_chat,
)
from services.wire.errors import UsageError
from services.wire.tasks.trial import TaskTrial

PROBLEMS = 64
"""Of each split."""
PLAYED = 6
"""Problems of which episodes are played."""
MOST_TURNS = 8
WITHIN_S = 4.0
"""No further problem is looked at after so long: an environment may be slow."""
_NONSENSE = ("", "0", "no idea")
_FORMATS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.")
"""In which environments look for a solution."""

_AGENT = "an agent is not played without a policy: its problems were posed"
_SPLITS: tuple[Split, ...] = ("train", "held_out")

ResultT = TypeVar("ResultT")


def made_task(name: str, environment: AnyEnvironment, dialect: Dialect, *, assumed: bool = False) -> TaskTrial:
    """What is known of a task once it is made. `assumed`: nobody has chosen its dialect, which is text."""
    agent = agent_of(environment) is not None
    chats = needs_chat(environment) or dialect == "chat"
    return TaskTrial(task=name, speaks="agent" if agent else "chat" if chats else "text", assumed=assumed)


async def try_task(made: TaskTrial, environment: AnyEnvironment, seed: int) -> TaskTrial:
    """`made`, with what the task does. What its code raises is in `failed`."""
    agent, trial = made.speaks == "agent", made
    try:
        async with AsyncExitStack() as stack:
            if isinstance(environment, AbstractAsyncContextManager):
                await stack.enter_async_context(environment)
            trial = _problems(trial, environment, seed)
            if agent:
                return msgspec.structs.replace(trial, unplayed=_AGENT)
            return _episodes(trial, environment, seed)  # type: ignore[arg-type]
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever its author's code raises
        return msgspec.structs.replace(trial, failed=describe(error))


class _Clock:
    """The slowest of the calls that it makes; the first is left out, which may load what the others use."""

    def __init__(self) -> None:
        self.slowest_s, self._calls = 0.0, 0

    def __call__(self, call: Callable[[], ResultT]) -> ResultT:
        began = time.perf_counter()
        result = call()
        self._calls += 1
        if self._calls > 1:
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
        return result


def _problems(trial: TaskTrial, environment: AnyEnvironment, seed: int) -> TaskTrial:
    posed, changed, clock = dict[Split, list[str]](train=[], held_out=[]), None, _Clock()
    characters = set[str]()
    ends = time.monotonic() + WITHIN_S
    for index in range(PROBLEMS):
        for split in _SPLITS:
            first = clock(partial(environment.problem, split, index, seed))
            again = environment.problem(split, index, seed)
            if changed is None and (words := _difference(first, again)):
                changed = f"problem({split!r}, {index}, {seed}) was asked for twice: {words}"
            posed[split].append(identity(first))
            if split == "train" and trial.speaks == "text":
                characters.update(first.prompt)
        if time.monotonic() > ends:
            break
    train, held = set(posed["train"]), set(posed["held_out"])
    # One text for all problems does not tell them apart.
    shared = sum(each in train for each in posed["held_out"]) if len(train) > 1 else 0
    return msgspec.structs.replace(
        trial,
        problems=len(posed["train"]),
        held_out=len(posed["held_out"]),
        shared=shared,
        different=len(held) if len(held | train) > 1 else 0,
        characters="".join(sorted(characters)),
        changed=changed,
        problem_s=clock.slowest_s,
    )


def _difference(first: Problem, again: Problem) -> str:
    for field in ("prompt", "messages", "solution"):
        one, other = getattr(first, field), getattr(again, field)
        if one != other:
            return f"{field} {str(one)[:60]!r}, then {str(other)[:60]!r}"
    return ""


def _episodes(trial: TaskTrial, environment: Environment, seed: int) -> TaskTrial:
    rewards: list[float] = []
    right, changed, clock = 0, trial.changed, _Clock()
    ends = time.monotonic() + WITHIN_S
    for index in range(PLAYED):
        problem = environment.problem("train", index, seed)
        for text, is_right in _answers(problem):
            played = _play(environment, problem, text, clock)
            if changed is None and played != (again := _play(environment, problem, text, clock)):
                changed = (
                    f"problem {index} was answered {text[:40]!r} twice: {_told(played)[:80]}, then {_told(again)[:80]}"
                )
            if isinstance(played[-1], float):
                rewards.append(played[-1])
                right += is_right
            if time.monotonic() > ends:
                break
    return msgspec.structs.replace(
        trial, changed=changed, rewards=rewards, right_answers=right, respond_s=clock.slowest_s
    )


def _answers(problem: Problem) -> Iterator[tuple[str, bool]]:
    """Texts, and whether the solution is in them."""
    yield from ((text, False) for text in _NONSENSE)
    if problem.solution:
        yield from ((form.format(problem.solution), True) for form in _FORMATS)


def _play(environment: Environment, problem: Problem, text: str, clock: _Clock) -> list[str | float]:
    """What the environment said to the same answer, turn by turn; its reward last, where it ends and judges itself."""
    episode = environment.start(problem)
    said: list[str | float] = [episode.first_turn]
    for _ in range(MOST_TURNS):
        reply = clock(partial(episode.respond, Answer(text, True, tuple(text.encode()))))
        if isinstance(reply, Ended):
            said.append(float(reply.reward))
        elif isinstance(reply, NextTurn):
            said.append(reply.text)
            continue
        break
    return said


def _told(said: list[str | float]) -> str:
    return " → ".join(f"reward {each:g}" if isinstance(each, float) else repr(each) for each in said[-2:])
