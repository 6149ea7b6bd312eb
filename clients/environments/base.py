"""The environment protocol: what an author writes so that a policy can be trained on a task.

Two kinds: an Environment (below), and an AgentEnvironment, where an existing agent calls the policy itself.

    environment.problem("train", 17, seed) ──► Problem            pure: the same arguments, the same problem
    environment.start(problem) ──► Episode                         one for each sibling of a group
      episode.first_turn ──► text for the policy                   appended to an empty session
      episode.respond(answer) ──► NextTurn(text) | Ended(reward)   the text is masked: the policy is not trained on it
                                | Judging(judge)                   somebody else says the reward, in their own time

All siblings of a group play the same problem, so that their rewards can be compared. Problems of the splits `train` and
`held_out` are disjoint whatever the seed; each environment says in its docstring what is disjoint about them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

from services.policies.diagnosis.raised import authors_line
from services.security.tls import Verify


def describe(error: BaseException) -> str:
    """`ValueError: no such tool (agent.py:41)`: what was raised, and the line of its author's code that raised it."""
    return f"{type(error).__name__}: {error}{authors_line(error)}"


Split = Literal["train", "held_out"]

_HELD_OUT_ONE_IN = 8

Message = Mapping[str, Any]
"""A chat message as OpenAI's API has it: `role`, `content`, and what else there is."""


@dataclass(frozen=True)
class Problem:
    """One task instance. `prompt` opens the conversation; the rest is the environment's own and never shown.

    `details`: whatever else the environment needs to play and judge it; nobody else looks at it. `messages`: what opens the
    conversation in the chat dialect, where that is more than one user message; the text dialect cannot say them.
    """

    split: Split
    index: int
    prompt: str
    solution: str = ""
    details: object = field(default=None, compare=False)
    messages: tuple[Message, ...] | None = field(default=None, compare=False)


_PLAIN = (str, int, float, bool, type(None), tuple, list, dict)


def identity(problem: Problem) -> str:
    """Equal for problems that ask the same, as far as their texts and plain details tell."""
    details = repr(problem.details) if isinstance(problem.details, _PLAIN) else ""
    return repr((problem.prompt, problem.messages, problem.solution, details))


def different(problems: Sequence[Problem]) -> int | None:
    """How many of them there are, each counted once; None where their texts do not tell them apart at all."""
    found = len({identity(problem) for problem in problems})
    told = all(isinstance(problem.details, _PLAIN) for problem in problems) and (found > 1 or len(problems) == 1)
    return found if told else None


@dataclass(frozen=True)
class Answer:
    """What the policy said in one turn: decoded text without special tokens.

    `complete` is False when it was cut off (token limit, abort) before the policy itself ended its turn.
    `token_ids`: what was sampled, where the environment has a true `reads_token_ids`; else empty, and never sent.
    """

    text: str
    complete: bool
    token_ids: tuple[int, ...] = ()


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


@runtime_checkable
class FiniteEnvironment(Protocol):
    """An environment, of either kind, that has so many problems and no more, such as the rows of a file.

    Its `problem(split, index, seed)` goes through all of them in an order of the seed's, then through all in another
    (`place_in_pass`).
    """

    def count(self, split: Split) -> int: ...

    def numbered(self, split: Split, number: int) -> Problem:
        """The problem that has this number, 0 … count − 1, whatever the seed; `index` says the number."""
        ...


def place_in_pass(name: str, split: Split, index: int, seed: int, count: int) -> int:
    """The number of the problem that is played at `index`: each of `count` once, then each once more in another order."""
    passed, place = divmod(index, count)
    return pass_order(name, split, passed, seed, count)[place]


@lru_cache(maxsize=8)
def pass_order(name: str, split: Split, passed: int, seed: int, count: int) -> tuple[int, ...]:
    """The order of the pass behind `passed` others; equal on every machine."""
    return tuple(problem_rng(name, split, passed, seed).sample(range(count), count))


def problem_rng(name: str, split: Split, index: int, seed: int) -> random.Random:
    """The random numbers of one problem: equal on every machine, independent between any two problems."""
    return random.Random(f"{name}/{split}/{index}/{seed}")


def split_of(key: str) -> Split:
    """Which split a problem belongs to, from its visible text alone: one in eight is held out, whatever the seed."""
    digest = hashlib.blake2s(key.encode(), digest_size=4).digest()
    return "held_out" if int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0 else "train"


ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class AgentEndpoint:
    """Where one episode's calls go. `base_url` and `api_key` are what an OpenAI client asks for; any model name will do.

    `max_tokens` (an answer) and `temperature` are the run's. They hold whatever the agent's calls say; a smaller
    `max_tokens` in a call is kept. `verify`: where the mesh speaks TLS, what takes its certificates: `verify` of an httpx
    client (and so of OpenAI's `http_client`), `ssl` of aiohttp's.
    """

    base_url: str
    api_key: str
    session_id: str
    max_tokens: int
    temperature: float
    verify: Verify = field(default=True, repr=False, compare=False)


@runtime_checkable
class AgentEnvironment(Protocol):
    """A task that an existing agent plays with any OpenAI client, while the server captures every token.

        environment.problem("train", 17, seed) ──► Problem                     pure: the same arguments, the same problem
        environment.play(problem, endpoint) ──► Ended(reward)                  one for each sibling of a group
          └── the agent's own calls ──► endpoint.base_url, endpoint.api_key

    The agent is any code: a loop with tools, a framework, another program. Where it raises, its session is aborted and its
    group is lost, with the cause in the log. `agent_environment` makes one from plain functions. An environment of either
    kind that is also an async context manager is entered before its first episode and left after the last.
    """

    @property
    def name(self) -> str: ...

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Problem number `index` (from 0) of a split. Fast and without I/O."""
        ...

    async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
        """Play one episode to its reward; it may take long. Cancelled at its time limit and when the runner ends."""
        ...


ProblemOf = Callable[[Split, int, int], Problem]
Play = Callable[[Problem, AgentEndpoint], Ended] | Callable[[Problem, AgentEndpoint], Awaitable[Ended]]


def agent_environment(name: str, problem: ProblemOf, play: Play) -> AgentEnvironment:
    """An AgentEnvironment from two functions. `play` may be a coroutine function or plain blocking code.

    Blocking code runs in a thread of its own. A thread cannot be stopped from outside: when its episode's time is over its
    session is aborted, so that its next call to the policy fails, and its result is ignored.
    """
    return _Functions(name, problem, play)


@dataclass(frozen=True)
class _Functions:
    name: str
    _problem: ProblemOf
    _play: Play

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return self._problem(split, index, seed)

    async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
        if inspect.iscoroutinefunction(self._play):
            ended = await self._play(problem, endpoint)
        else:
            ended = await in_thread(lambda: self._play(problem, endpoint))
            if inspect.isawaitable(ended):
                ended = await ended
        return ended  # type: ignore[no-any-return]


async def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run blocking `work` in a daemon thread of its own. Cancelling the wait leaves the thread behind, result ignored.

    A pool would bound how many agents play at once, and keep the process from ending while one of them hangs.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it belongs to the coroutine that waits
            # A coroutine cannot be handed a StopIteration: it would look like its end.
            failed = RuntimeError("the agent raised StopIteration") if isinstance(error, StopIteration) else error
        except BaseException as error:  # noqa: BLE001 - an agent that exits must not take the runner with it
            failed = RuntimeError(f"the agent raised {type(error).__name__}")
        # The loop may be gone: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await done


AnyEnvironment = Environment | AgentEnvironment


def agent_of(environment: AnyEnvironment) -> AgentEnvironment | None:
    """The environment, where it is an agent environment; else it is an Environment.

    Asked for each group: `isinstance` of a protocol takes tens of microseconds each time.
    """
    return cast("AgentEnvironment", environment) if hasattr(environment, "play") else None


Dialect = Literal["auto", "text", "chat"]
"""How an Environment speaks to the policy: plain text, or chat messages in the model's own template. `auto` asks the
server: chat where the model has a template, text where it has none. An agent environment calls the policy as it
likes."""


def reads_token_ids(environment: AnyEnvironment) -> bool:
    """Whether its answers carry the tokens that were sampled: such an environment has a true `reads_token_ids`."""
    return bool(getattr(environment, "reads_token_ids", False))


def needs_chat(environment: AnyEnvironment) -> bool:
    """Whether its prompts are chat messages (`Problem.messages`): such an environment has a true `speaks_chat`."""
    return bool(getattr(environment, "speaks_chat", False))
