"""Several calls that came in one request, `POST /calls` (`services.wire.joined_calls`), at a service that takes such.

    request ──► a task a call ──► answered as if it had come alone ──► a line, as soon as it is answered
                    ├── the client disconnects: all that is not answered is ended
                    └── POST /calls/given-up with a call's name: that one is

A request costs a service as much as what a group's opening or end asks of it: those that come at once come in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Scope

from services.http.app import error_answer
from services.http.connection import Caller, state_for
from services.http.streaming import EventStream, LastChunk
from services.wire.errors import UNDECODABLE, RollmeshError, UsageError
from services.wire.gateway_api import CALL_HEADER
from services.wire.joined_calls import GIVEN_UP, LINES, PATH, GivenUp, JoinedAnswer, JoinedCall, JoinedCalls

_NAME = CALL_HEADER.encode()
_OF_THE_REQUEST = (b"content-length", _NAME)
_joined = msgspec.json.Decoder(JoinedCalls)
_given_up = msgspec.json.Decoder(GivenUp)
_encoder = msgspec.json.Encoder()
_log = structlog.get_logger()
BodyT = TypeVar("BodyT", bound=msgspec.Struct)

AnswerOne = Callable[[JoinedCall, Caller, Scope], Awaitable[Response]]
"""Answers one of the calls of a request; the caller leaves when nobody waits for it any more. The scope is the request's,
without the headers that say something of itself (`scope_of`)."""


class Lines(EventStream):
    """The answer to a request of several calls."""

    media_type = LINES
    head_at_once = False


class CallsInOne:
    """Joined calls that are being answered, each by `answer`."""

    def __init__(self, answer: AnswerOne) -> None:
        self._answer = answer
        self._named: dict[str, set[Caller]] = {}
        """Who waits for the calls that have names."""

    def give_up(self, names: Sequence[str]) -> None:
        """Nobody waits for the calls of these names any more."""
        for name in names:
            for caller in tuple(self._named.get(name, ())):
                caller.left()

    async def answers(self, calls: Sequence[JoinedCall], scope: Scope) -> AsyncGenerator[bytes, None]:
        """A line a call, several at once where they have piled up. Where it is closed, all that runs is ended."""
        lines, ended = list[bytes](), asyncio.Event()
        shared = {**scope, "headers": [each for each in scope["headers"] if each[0] not in _OF_THE_REQUEST]}

        async def answer(number: int, call: JoinedCall, caller: Caller) -> None:
            lines.append(await self._line(number, call, caller, shared))
            ended.set()

        callers = [Caller() for _ in calls]
        tasks = [
            asyncio.create_task(answer(number, call, caller))
            for number, (call, caller) in enumerate(zip(calls, callers, strict=True))
        ]
        try:
            left = len(tasks)
            while left:
                await ended.wait()
                ended.clear()
                left -= len(lines)
                some = b"".join(lines)
                lines.clear()
                yield some if left else LastChunk(some)
        finally:
            if unfinished := [task for task in tasks if not task.done()]:
                for task, caller in zip(tasks, callers, strict=True):
                    if not caller.on_gone:
                        task.cancel()
                    caller.left()  # who listens for that ends by itself, and knows why
                await asyncio.gather(*unfinished, return_exceptions=True)

    async def _line(self, number: int, call: JoinedCall, caller: Caller, scope: Scope) -> bytes:
        if not call.name:
            return await self._answered(number, call, caller, scope)
        callers = self._named.setdefault(call.name, set())
        callers.add(caller)
        try:
            return await self._answered(number, call, caller, scope)
        finally:
            callers.discard(caller)
            if not callers:
                self._named.pop(call.name, None)

    async def _answered(self, number: int, call: JoinedCall, caller: Caller, scope: Scope) -> bytes:
        try:
            response = await self._answer(call, caller, scope)
        except RollmeshError as error:
            response = error_answer(error)
        except Exception as error:  # noqa: BLE001 - a bug: logged with its traceback, and the others are answered
            _log.exception("a joined call failed", path=call.path)
            response = error_answer(
                RollmeshError(f"the service failed on this call ({type(error).__name__})", "see its log")
            )
        status, body = response.status_code, msgspec.Raw(bytes(response.body) or b"null")
        retry_after = response.headers.get("retry-after") if status >= 400 else None
        return _encoder.encode(JoinedAnswer(number, status, body, retry_after)) + b"\n"


def read_joined(content_type: str | None, body: bytes) -> list[JoinedCall]:
    """Raises UsageError for a body that is no JoinedCalls."""
    return _read(_joined, PATH, content_type, body).calls


def read_given_up(content_type: str | None, body: bytes) -> list[str]:
    """The names. Raises UsageError for a body that is no GivenUp."""
    return _read(_given_up, GIVEN_UP, content_type, body).names


def scope_of(call: JoinedCall, caller: Caller, scope: Scope) -> dict[str, Any]:
    """The scope of one of the calls, as if it had come alone. `scope`: as `CallsInOne` passes it on."""
    headers = [*scope["headers"], (_NAME, call.name.encode())] if call.name else scope["headers"]
    path = {"path": unquote(call.path), "raw_path": call.path.encode(), "query_string": b""}
    # What one call notes about itself is not the others'.
    return {**scope, **path, "headers": headers, "state": state_for(caller, scope)}


def _read(decoder: msgspec.json.Decoder[BodyT], path: str, content_type: str | None, body: bytes) -> BodyT:
    if not (content_type or "").startswith("application/json"):
        raise UsageError("the content type is not application/json", "send JSON")
    try:
        return decoder.decode(body)
    except UNDECODABLE as error:
        raise UsageError(f"the body is not what {path} takes ({error})", "see GET /openapi.json") from error
