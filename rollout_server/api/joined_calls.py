"""`POST /calls`: several calls of a runner in one request (`services.wire.joined_calls`).

    request ──► a task a call ──► its route, as if it had come alone ──► a line, as soon as it is answered
                    ├── the client disconnects: all that is not answered is ended
                    └── POST /calls/given-up with a call's name: that one is

A request costs a rollout server as much as what a group's opening or end asks of it: those that come at once come in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
import structlog
from fastapi import APIRouter, Request, Response
from starlette.types import Message, Scope

from rollout_server.api.routes import ERRORS, Ready, RolloutRoute
from rollout_server.api.streaming import EventStream, LastChunk
from rollout_server.sessions.access import Access
from services.http.app import error_answer
from services.http.connection import Caller, state_for
from services.http.route_index import respond
from services.http.struct_answer import schema_of
from services.wire.errors import UNDECODABLE, NotFoundError, RollmeshError, UsageError
from services.wire.gateway_api import CALL_HEADER
from services.wire.joined_calls import GIVEN_UP, LINES, PATH, GivenUp, JoinedAnswer, JoinedCall, JoinedCalls

JOINED = ("/groups", "/groups/{group_id}/turns", "/groups/{group_id}/finish")
"""Paths that may be called so."""
_NAME = CALL_HEADER.encode()
_OF_THE_REQUEST = (b"content-length", _NAME)
_joined = msgspec.json.Decoder(JoinedCalls)
_given_up = msgspec.json.Decoder(GivenUp)
_encoder = msgspec.json.Encoder()
_log = structlog.get_logger()
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def joined_routes(access: Ready[Access], routes: Sequence[Any], handlers: Mapping[Any, Any]) -> APIRouter:
    """`routes`: the application's, those of JOINED among them; `handlers`: of errors, as the application has them."""
    router = APIRouter(route_class=RolloutRoute, tags=["rollout"], responses=ERRORS)
    calls = _Calls([route for route in routes if isinstance(route, RolloutRoute) and route.path in JOINED], handlers)

    @router.post(
        PATH,
        response_class=Response,
        responses={200: {"description": "A line a call, in the order of their ends", "content": {LINES: {}}}},
        openapi_extra=_taking(JoinedCalls),
    )
    async def call_joined(request: Request) -> Response:
        """Open or finish groups, or take turns in them, several calls at once: each as by its own route."""
        access().require_agent(request)
        return _Lines(calls.answers((await _read(request, _joined)).calls, request.scope))

    @router.post(GIVEN_UP, status_code=204, openapi_extra=_taking(GivenUp))
    async def give_up(request: Request) -> Response:
        """End those of the joined calls with these names that are not answered yet: nobody waits for them any more."""
        access().require_agent(request)
        calls.give_up((await _read(request, _given_up)).names)
        return Response(status_code=204)

    return router


class _Lines(EventStream):
    media_type = LINES
    head_at_once = False


def _taking(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(body)}}}}


async def _read(request: Request, body: msgspec.json.Decoder[BodyT]) -> BodyT:
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise UsageError("the content type is not application/json", "send JSON")
    try:
        return body.decode(await request.body())
    except UNDECODABLE as error:
        raise UsageError(f"the body is not what {request.url.path} takes ({error})", "see GET /openapi.json") from error


class _Calls:
    """Joined calls that are being answered. `routes`: those that may be called so."""

    def __init__(self, routes: Sequence[RolloutRoute], handlers: Mapping[Any, Any]) -> None:
        self._routes = routes
        self._handlers = handlers
        self._named: dict[str, set[Caller]] = {}
        """Who waits for the calls that have names."""

    def give_up(self, names: Sequence[str]) -> None:
        for name in names:
            for caller in tuple(self._named.get(name, ())):
                caller.left()

    async def answers(self, calls: Sequence[JoinedCall], scope: Scope) -> AsyncGenerator[bytes, None]:
        """A line a call, several at once where they have piled up. Where it is closed, all that runs is ended."""
        lines, ended = list[bytes](), asyncio.Event()

        async def answer(number: int, call: JoinedCall, caller: Caller) -> None:
            lines.append(await self._line(number, call, caller, scope))
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
            for task, caller in zip(tasks, callers, strict=True):
                if not caller.on_gone:
                    task.cancel()
                caller.left()  # who listens for that ends by itself, and knows why
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _line(self, number: int, call: JoinedCall, caller: Caller, scope: Scope) -> bytes:
        if not call.name:
            return await self._answer(number, call, _request(scope, call, caller))
        callers = self._named.setdefault(call.name, set())
        callers.add(caller)
        try:
            return await self._answer(number, call, _request(scope, call, caller))
        finally:
            callers.discard(caller)
            if not callers:
                self._named.pop(call.name, None)

    async def _answer(self, number: int, call: JoinedCall, request: Request) -> bytes:
        """The line of one call."""
        try:
            route, request.scope["path_params"] = _find(self._routes, call.path)
            response = await respond(route, request, self._handlers)
        except RollmeshError as error:
            response = error_answer(error)
        except Exception as error:  # noqa: BLE001 - a bug: logged with its traceback, and the others are answered
            _log.exception("a joined call failed", path=call.path)
            response = error_answer(
                RollmeshError(f"the server failed on this call ({type(error).__name__})", "see its log")
            )
        body = msgspec.Raw(bytes(response.body) or b"null")
        answer = JoinedAnswer(number, response.status_code, body, response.headers.get("retry-after"))
        return _encoder.encode(answer) + b"\n"


def _find(routes: Sequence[RolloutRoute], path: str) -> tuple[RolloutRoute, dict[str, str]]:
    path = unquote(path)
    for route in routes:
        if (match := route.path_regex.fullmatch(path)) is not None:
            return route, match.groupdict()
    raise NotFoundError(f"{path!r} is no path that {PATH} takes", f"it takes {' and '.join(JOINED)}")


def _request(scope: Scope, call: JoinedCall, caller: Caller) -> Request:
    """The call as it would have come alone."""
    headers = [header for header in scope["headers"] if header[0] not in _OF_THE_REQUEST]
    if call.name:
        headers.append((_NAME, call.name.encode()))

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(call.body), "more_body": False}

    # What one call notes about itself is not the others'.
    own = {"path": unquote(call.path), "headers": headers, "state": state_for(caller, scope)}
    return Request({**scope, **own}, receive)
