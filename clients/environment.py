"""The environment protocol: what an author writes so that a policy can be trained on a task.

An existing agent that calls the policy itself is the other kind: `clients.agent.AgentEnvironment`.

    environment.problem("train", 17, seed) ──► Problem            pure: the same arguments, the same problem
    environment.start(problem) ──► Episode                         one for each sibling of a group
      episode.first_turn ──► text for the policy                   appended to an empty session
      episode.respond(answer) ──► NextTurn(text) | Ended(reward)   the text is masked: the policy is not trained on it
                                | Judging(judge)                   somebody else says the reward, in their own time

All siblings of a group play the same problem, so that their rewards can be compared. Problems of the splits `train` and
`held_out` are disjoint whatever the seed; each environment says in its docstring what is disjoint about them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

Split = Literal["train", "held_out"]

_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """One task instance. `prompt` opens the conversation; the rest is the environment's own and never shown.

    `details`: whatever else the environment needs to play and judge it; nobody else looks at it.
    """

    split: Split
    index: int
    prompt: str
    solution: str = ""
    details: object = field(default=None, compare=False)


@dataclass(frozen=True)
class Answer:
    """What the policy said in one turn: decoded text without special tokens.

    `complete` is False when it was cut off (token limit, abort) before the policy itself ended its turn.
    """

    text: str
    complete: bool


@dataclass(frozen=True)
class NextTurn:
    """The episode goes on: `text` is appended (masked) and the policy speaks again."""

    text: str


@dataclass(frozen=True)
class Ended:
    """The episode is over. `success` and `components` are recorded beside the reward, which alone is trained on."""

    reward: float
    success: bool
    components: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Judging:
    """The episode is over, and what it was worth takes I/O to tell. `judge` is awaited once, by the runner.

    It may raise: RewardFailedError where there is no reward. The group is lost then; it is never a reward of 0.
    """

    judge: Callable[[], Awaitable[Ended]] = field(compare=False)


class Episode(Protocol):
    """One playing of one problem. It may hold state; it is used by one task at a time."""

    @property
    def first_turn(self) -> str: ...

    def respond(self, answer: Answer) -> NextTurn | Ended | Judging: ...


@runtime_checkable
class Environment(Protocol):
    """A task. Both methods are fast and do no I/O: the runner calls them on its event loop."""

    @property
    def name(self) -> str: ...

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Problem number `index` (from 0) of a split; a pure function of its arguments."""
        ...

    def start(self, problem: Problem) -> Episode: ...


def draws(name: str, split: Split, index: int, seed: int) -> random.Random:
    """The random numbers of one problem: equal on every machine, independent between any two problems."""
    return random.Random(f"{name}/{split}/{index}/{seed}")


def split_of(key: str) -> Split:
    """Which split a problem belongs to, from its visible text alone: one in eight is held out, whatever the seed."""
    digest = hashlib.blake2s(key.encode(), digest_size=4).digest()
    return "held_out" if int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0 else "train"
