"""Failover benchmark: servers are killed while agents hold conversations; measures how long an agent waits.

    agents talk ─► each server has its share ─► a random moment ─► kill -9 ─► all that it sampled go on ─► started anew ─► …

A call counts that was in flight in a session of the killed server: whose group Redis says it held, just before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import aiohttp
import msgspec
from redis.asyncio import Redis

from benchmarks.harness.fleet import Fleet
from benchmarks.harness.servers import HttpArm, Opened, completion_tokens
from benchmarks.harness.workload import Exchange
from rollout_server.lifecycle.takeover import incarnation_of
from services.host.aio import first_failure
from services.http.app import DONE
from services.run_store.client import as_text, connect
from services.run_store.discovery import ServiceRegistry
from services.run_store.keys import RunKeys
from services.wire.errors import DeadlineError, RollmeshError

_SOONEST_S, _LATEST_S = 0.2, 2.5
_WITHIN_S = 90.0
_LOOK_S = 0.02


async def kill_under_load(
    fleet: Fleet,
    questions: Sequence[Exchange],
    agents: int,
    kills: int,
    rng: random.Random,
    after_kill: Callable[[int, Kill], None],
) -> Killed:
    """Kill the servers in turn, each ready again before the next. Raises RollmeshError for the first error of any agent."""
    talking = TalkingAgents(fleet.gateway.arm, questions)
    redis = connect(fleet.plan.redis_url)
    killer = _Killer(fleet, talking, redis, agents, rng)
    killed = Killed()
    try:
        with first_failure():
            async with asyncio.TaskGroup() as tasks:
                for number in range(agents):
                    tasks.create_task(talking.talk(streams=number % 2 == 0))
                for number in range(kills):
                    victim = sorted(fleet.servers)[number % len(fleet.servers)]
                    kill = await killer.kill(victim)
                    killed.kills.append(kill)
                    after_kill(number + 1, kill)
                talking.finish()
    finally:
        await redis.aclose()
    killed.answers = talking.answers
    return killed


class _Killer:
    def __init__(self, fleet: Fleet, talking: TalkingAgents, redis: Redis, agents: int, rng: random.Random) -> None:
        self._fleet = fleet
        self._talking = talking
        self._redis = redis
        self._registry = ServiceRegistry(redis, fleet.plan.run_id)
        self._owners = RunKeys(fleet.plan.run_id).owners
        self._share = max(agents // (2 * len(fleet.servers)), 1)
        self._rng = rng

    async def kill(self, server_id: str) -> Kill:
        """Kill a server at a random moment, see its calls go on elsewhere, start it anew."""
        await self._until(self._balanced, f"each server to hold {self._share} calls or more")
        await asyncio.sleep(self._rng.uniform(_SOONEST_S, _LATEST_S))
        # The death of a server that holds nothing says nothing.
        await self._until(self._balanced, f"each server to hold {self._share} calls again")
        calls = await self._calls_at(server_id)
        killed_at = time.monotonic()
        await self._fleet.kill(server_id)
        await self._until(lambda: _all_heard(calls, killed_at), "every call of a killed server to go on elsewhere")
        await self._fleet.start(server_id)
        return Kill(
            server_id,
            [heard for call in calls if call.streamed and (heard := _heard(call, killed_at)) is not None],
            [heard for call in calls if not call.streamed and (heard := _heard(call, killed_at)) is not None],
        )

    async def _balanced(self) -> bool:
        """Whether each server holds half its share or more: the one that was started last has new sessions only."""
        return all([len(await self._calls_at(each)) >= self._share for each in self._fleet.servers])

    async def _calls_at(self, server_id: str) -> list[AgentCall]:
        """What is in flight in sessions that a server, as it runs now, holds."""
        names = {incarnation_of(each) for each in await self._registry.servers() if each.name == server_id}
        owners = await self._redis.hgetall(self._owners)
        groups = {as_text(group) for group, owner in owners.items() if as_text(owner) in names}
        return [call for call in self._talking.in_flight if call.group_id in groups]

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(_WITHIN_S):
                while True:
                    if await holds():
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise DeadlineError(f"waited {_WITHIN_S:.0f} s for {what}", self._fleet.gateway.child.tail()) from error


def _heard(call: AgentCall, killed_at: float) -> float | None:
    return until_heard(killed_at, call.began, call.arrivals)


async def _all_heard(calls: Sequence[AgentCall], killed_at: float) -> bool:
    return all(call.ended or _heard(call, killed_at) is not None for call in calls)


# The agents retry nothing: any answer that is an error, is cut short or breaks off fails the benchmark.

TURNS = 4
_CALL_WITHIN_S = 120.0
_DATA = b"data: "
_DONE = DONE.rstrip()


@dataclass(eq=False)
class AgentCall:
    """A call that an agent waits for. Times are of `time.monotonic`; `arrivals`: of what it was sent so far."""

    group_id: str
    streamed: bool
    began: float
    arrivals: list[float] = field(default_factory=list)
    ended: bool = False


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Part(msgspec.Struct):
    """A chunk of a streamed answer, or a whole one."""

    choices: list[_Choice]


_part = msgspec.json.Decoder(_Part)


class TalkingAgents:
    """`in_flight`: the calls that somebody waits for. `answers`: how many came, all whole."""

    def __init__(self, arm: HttpArm, questions: Sequence[Exchange]) -> None:
        self.in_flight: set[AgentCall] = set()
        self.answers = 0
        self._arm = arm
        self._questions = questions
        self._asked = count()
        self._over = asyncio.Event()

    def finish(self) -> None:
        """Nobody opens another session, and each ends with the turn that it is in."""
        self._over.set()

    async def talk(self, streams: bool) -> None:
        """One agent: one session after another, until told to finish. Raises RollmeshError for whatever goes wrong."""
        while not self._over.is_set():
            session = await self._arm.open_one()
            messages: list[dict[str, str]] = []
            for _ in range(TURNS):
                question = self._questions[next(self._asked) % len(self._questions)]
                messages += question.messages[-1:]
                said = await self._ask(session, msgspec.structs.replace(question, messages=messages), streams)
                messages = [*messages, {"role": "assistant", "content": said}]
                if self._over.is_set():
                    break
            await self._arm.give_up([session])

    async def _ask(self, session: Opened, exchange: Exchange, streams: bool) -> str:
        call = AgentCall(session.group_id, streams, time.monotonic())
        self.in_flight.add(call)
        try:
            async with (
                asyncio.timeout(_CALL_WITHIN_S),
                self._arm.asking(exchange, session, "streamed" if streams else "plain") as answer,
            ):
                said = await (_read_stream if streams else _read)(answer, call, exchange)
        except TimeoutError as error:
            raise DeadlineError(f"an answer was not whole after {_CALL_WITHIN_S:.0f} s", "see the logs") from error
        except aiohttp.ClientError as error:
            raise RollmeshError(f"an answer broke off ({error!r})", "see the logs") from error
        finally:
            call.ended = True
            self.in_flight.discard(call)
        self.answers += 1
        return said


async def _read(answer: aiohttp.ClientResponse, call: AgentCall, exchange: Exchange) -> str:
    body = await answer.read()
    call.arrivals.append(time.monotonic())
    completion_tokens(body, exchange.max_tokens)
    return "".join(_text(body))


async def _read_stream(answer: aiohttp.ClientResponse, call: AgentCall, exchange: Exchange) -> str:
    said: list[str] = []
    rest = last = b""
    done = False
    async for chunk in answer.content.iter_any():
        call.arrivals.append(time.monotonic())
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            done = event == _DONE
            if not done:
                said += _text(event.removeprefix(_DATA))
                last = event
    if rest or not done:
        raise RollmeshError(f"a stream ended without its end, with {(rest or last)[-300:]!r}", "see the logs")
    completion_tokens(last, exchange.max_tokens)
    return "".join(said)


def _text(part: bytes) -> list[str]:
    """The text of a chunk or a whole answer. Raises RollmeshError for anything else, and for an answer that was aborted."""
    try:
        choices = _part.decode(part).choices
    except msgspec.MsgspecError as error:
        raise RollmeshError(f"an agent was sent {part[:300]!r} ({error})", "see the logs") from error
    if any(choice.finish_reason not in (None, "length") for choice in choices):
        raise RollmeshError(f"an answer ended otherwise than by its length: {part[:300]!r}", "see the logs")
    return [said.content for choice in choices if (said := choice.delta or choice.message) and said.content]


ON_ITS_WAY_S = 0.1


def until_heard(killed_at: float, began: float, arrivals: Sequence[float]) -> float | None:
    """Failover time of a stream: seconds from the kill to the chunk that ended the silence. All times on one clock.

        chunks     │││││││ ││                 │││││││││
                         ▲   ◄── silence ──►
                         kill ─── figure ──►

    Chunks in transit at the kill still arrive, so the silence is the longest gap that begins within ON_ITS_WAY_S of it.

    `began`: when the call was sent, before the kill. `arrivals`: of its chunks so far, in order. None as long as only what
    was on its way has come; for ever, if that was the whole rest of the answer.
    """
    known_after = killed_at + ON_ITS_WAY_S
    if not arrivals or arrivals[-1] <= known_after:
        return None
    last_before = max([began, *(time for time in arrivals if time <= killed_at)])
    gaps = pairwise([last_before, *(time for time in arrivals if time > killed_at)])
    silences = [(end - max(start, killed_at), end) for start, end in gaps if start <= known_after]
    return max(silences)[1] - killed_at


class Kill(msgspec.Struct, frozen=True):
    """One kill. Seconds from it: `streamed`, to the next chunk; `whole`, to the end of answers that are not streamed."""

    server_id: str
    streamed: list[float]
    whole: list[float]


@dataclass
class Killed:
    """All kills. `answers`: that agents got in the whole time, none of them an error."""

    kills: list[Kill] = field(default_factory=list)
    answers: int = 0

    @property
    def streamed_s(self) -> list[float]:
        return [seconds for kill in self.kills for seconds in kill.streamed]

    @property
    def whole_s(self) -> list[float]:
        return [seconds for kill in self.kills for seconds in kill.whole]
