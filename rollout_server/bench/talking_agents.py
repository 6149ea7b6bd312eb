"""Agents that hold conversations through one address, half of them streamed, and note when they hear something.

They do what an agent with no patience does: nothing is tried again. Any answer that is an error, is cut short or breaks off
fails the benchmark.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import aiohttp
import msgspec

from rollout_server.bench.http_arm import HttpArm, Opened, completion_tokens
from rollout_server.bench.workload import Exchange
from services.event_stream import DONE
from services.wire.errors import DeadlineError, RollmeshError

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
