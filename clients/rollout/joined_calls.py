"""Calls of one client that are made at once go in one request (`services.wire.joined_calls`).

    call ─┐                                      ┌─► its answer, as soon as its line is here
    call ─┼─► the event loop's next turn ─► POST ─┼─► …
    call ─┘    └── a single one ─► sent alone    └── the request breaks ─► each that has none fails, and may be sent again

A runner opens groups by the dozen when admission opens, lets all of them take a turn, and finishes many when a batch is
decoded; a request of its own for each took a seventh of its CPU. The request is broken off when nobody waits for any of its
calls. Of one that nobody waits for among others the server is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
import structlog

from clients.rollout.calls import Call
from services.wire.errors import UNDECODABLE, RollmeshError, WireError
from services.wire.joined_calls import GIVEN_UP, MOST_CALLS, GivenUp, JoinedAnswer, JoinedCall, JoinedCalls

MOST_BYTES = 256 << 10
"""Of the bodies of joined calls; a longer one goes alone."""
_line = msgspec.json.Decoder(JoinedAnswer)
_encoder = msgspec.json.Encoder()
_log = structlog.get_logger()


class NotJoinedError(RollmeshError):
    """The service takes no joined calls: an older one, which does not know them."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """`answer`: None where the call is to be sent alone."""

    call: Call[Any]
    answer: asyncio.Future[JoinedAnswer | None]


@dataclass(eq=False, slots=True)
class _Request:
    calls: list[_Waiting]
    task: asyncio.Task[None] | None = None

    @property
    def deserted(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return all(each.answer.done() for each in self.calls)


Post = Callable[[bytes, float], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Sends a body, within so many seconds; gives the answer in pieces. Raises NotJoinedError, and what a call alone would."""


@dataclass(eq=False, slots=True)
class CallJoiner:
    """`alone`: sends one call. `refused`: the error that an answer stands for; `broken`: of a call whose answer never came,
    because of this. `off`: none is joined, such as at a service that takes none."""

    post: Post
    alone: Callable[[Call[Any]], Awaitable[bytes]]
    refused: Callable[[Call[Any], JoinedAnswer], RollmeshError]
    broken: Callable[[str], RollmeshError]
    off: bool = False
    _waiting: list[_Waiting] = field(default_factory=list)
    _requests: set[_Request] = field(default_factory=set)
    _given_up: list[str] = field(default_factory=list)
    """Names of calls that the service is to be told of."""
    _telling: asyncio.Task[None] | None = None

    async def send(self, call: Call[Any]) -> bytes:
        """The body of the call's answer. Raises what it would raise if it were sent alone."""
        if self.off or not call.joins:
            return await self.alone(call)
        loop = asyncio.get_running_loop()
        waiting = _Waiting(call, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(call.timeout_s):
                answer = await waiting.answer
        except TimeoutError as error:
            self._left(waiting, given_up=False)  # it may be sent again
            raise self.broken(f"no answer in {call.timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._left(waiting, given_up=True)
            raise
        if answer is None:
            return await self.alone(call)
        if answer.status >= 400:
            raise self.refused(call, answer)
        return bytes(answer.body)

    async def close(self) -> None:
        self.off = True
        tasks = [request.task for request in self._requests if request.task is not None]
        if self._telling is not None:
            tasks.append(self._telling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _left(self, waiting: _Waiting, *, given_up: bool) -> None:
        for request in tuple(self._requests):
            if waiting not in request.calls:
                continue
            if request.deserted and request.task is not None:
                request.task.cancel()
            elif given_up and waiting.call.name is not None and not self.off:
                self._given_up.append(waiting.call.name)
                if self._telling is None:
                    self._telling = asyncio.create_task(self._tell(), name="calls given up")

    async def _tell(self) -> None:
        """The service, of all that is given up."""
        try:
            while self._given_up:
                names, self._given_up = self._given_up[:MOST_CALLS], self._given_up[MOST_CALLS:]
                await self.alone(Call("POST", GIVEN_UP, _encoder.encode(GivenUp(names)), lambda _: None))
        except RollmeshError as error:
            self._given_up.clear()
            _log.info("calls that were given up run to their end", why=str(error))
        finally:
            self._telling = None

    def _flush(self) -> None:
        """Send what was called for since the last turn."""
        waiting, self._waiting = [each for each in self._waiting if not each.answer.done()], []
        while waiting:
            count = _fitting(waiting)
            calls, waiting = waiting[:count], waiting[count:]
            if len(calls) == 1:
                calls[0].answer.set_result(None)
                continue
            request = _Request(calls)
            self._requests.add(request)
            request.task = asyncio.create_task(self._send(request), name="joined calls")

    async def _send(self, request: _Request) -> None:
        calls = request.calls
        try:
            body = _encoder.encode(JoinedCalls([_joined(each.call) for each in calls]))
            async with self.post(body, max(each.call.timeout_s for each in calls)) as pieces:
                await _read(pieces, calls)
            _settle(calls, self.broken("the answer broke off"))
        except NotJoinedError:
            self.off = True
            _settle(calls, None)
        except RollmeshError as error:
            _settle(calls, error)
        except BaseException:
            _settle(calls, self.broken("the request was broken off"))
            raise
        finally:
            self._requests.discard(request)


def _fitting(waiting: Sequence[_Waiting]) -> int:
    """How many of them go in one request, from the first on."""
    nbytes = accumulate(len(each.call.payload or b"") for each in waiting[:MOST_CALLS])
    return max(1, sum(each <= MOST_BYTES for each in nbytes))


def _joined(call: Call[Any]) -> JoinedCall:
    return JoinedCall(call.path, msgspec.Raw(call.payload or b"null"), call.name or "")


async def _read(pieces: AsyncIterator[bytes], calls: Sequence[_Waiting]) -> None:
    """Raises WireError for a line that is no answer."""
    unread = b""
    async for piece in pieces:
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            try:
                answer = _line.decode(line)
                waiting = calls[answer.number].answer
            except (*UNDECODABLE, IndexError) as error:
                what = f"joined calls were answered {line[:200]!r}"
                raise WireError(what, "run client and server of the same version") from error
            if not waiting.done():
                waiting.set_result(answer)


def _settle(calls: Sequence[_Waiting], end: RollmeshError | None) -> None:
    """End those that have no answer: with an error, or to be sent alone."""
    for each in calls:
        if each.answer.done():
            continue
        if end is None:
            each.answer.set_result(None)
        else:
            each.answer.set_exception(end)
