"""`POST /calls`: several calls of a runner in one request (`services.wire.joined_calls`).

    request ──► a task a call ──► its route, as if it had come alone ──► a line, as soon as it is answered
                    └── the client disconnects: all that is not answered is cancelled

A request costs a rollout server as much as what a group's opening or end asks of it: those that come at once come in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec
import structlog
from fastapi import APIRouter, Request, Response
from starlette.types import Message, Scope

from rollout_server.api.routes import ERRORS, Ready, RolloutRoute
from rollout_server.api.streaming import EventStream, LastChunk
from rollout_server.sessions.access import Access
from services.http.app import error_answer
from services.http.route_index import respond
from services.http.struct_answer import schema_of
from services.wire.errors import UNDECODABLE, NotFoundError, RollmeshError, UsageError
from services.wire.gateway_api import CALL_HEADER
from services.wire.joined_calls import LINES, PATH, JoinedAnswer, JoinedCall, JoinedCalls

JOINED = ("/groups", "/groups/{group_id}/finish")
"""Paths that may be called so. Not turns: who gives one up closes its connection, and that ends its generation."""
_NAME = CALL_HEADER.encode()
_OF_THE_REQUEST = (b"content-length", _NAME)
_calls = msgspec.json.Decoder(JoinedCalls)
_encoder = msgspec.json.Encoder()
_log = structlog.get_logger()


def joined_routes(access: Ready[Access], routes: Sequence[Any], handlers: Mapping[Any, Any]) -> APIRouter:
    """`routes`: the application's, those of JOINED among them; `handlers`: of errors, as the application has them."""
    router = APIRouter(route_class=RolloutRoute, tags=["rollout"], responses=ERRORS)
    joined = [route for route in routes if isinstance(route, RolloutRoute) and route.path in JOINED]

    @router.post(
        PATH,
        response_class=Response,
        responses={200: {"description": "A line a call, in the order of their ends", "content": {LINES: {}}}},
        openapi_extra={"requestBody": {"content": {"application/json": {"schema": schema_of(JoinedCalls)}}}},
    )
    async def call_joined(request: Request) -> Response:
        """Open or finish groups, several at once: each as by its own route."""
        access().require_agent(request)
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise UsageError("the content type is not application/json", "send JSON")
        calls = _read(await request.body())
        return _Lines(_answers(joined, handlers, calls, request.scope))

    return router


class _Lines(EventStream):
    media_type = LINES
    head_at_once = False


def _read(body: bytes) -> list[JoinedCall]:
    try:
        return _calls.decode(body).calls
    except UNDECODABLE as error:
        raise UsageError(f"the body is not what {PATH} takes ({error})", "see GET /openapi.json") from error


async def _answers(
    routes: Sequence[RolloutRoute], handlers: Mapping[Any, Any], calls: Sequence[JoinedCall], scope: Scope
) -> AsyncGenerator[bytes, None]:
    lines, ended = list[bytes](), asyncio.Event()

    async def answer(number: int, call: JoinedCall) -> None:
        lines.append(await _line(routes, handlers, number, call, scope))
        ended.set()

    tasks = [asyncio.create_task(answer(number, call)) for number, call in enumerate(calls)]
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
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _line(
    routes: Sequence[RolloutRoute], handlers: Mapping[Any, Any], number: int, call: JoinedCall, scope: Scope
) -> bytes:
    """What is answered to one call."""
    try:
        route, parameters = _find(routes, call.path)
        response = await respond(route, _request(scope, call, parameters), handlers)
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


def _request(scope: Scope, call: JoinedCall, parameters: dict[str, str]) -> Request:
    """The call as it would have come alone, from the same caller."""
    headers = [header for header in scope["headers"] if header[0] not in _OF_THE_REQUEST]
    if call.name:
        headers.append((_NAME, call.name.encode()))

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(call.body), "more_body": False}

    # What one call notes about itself is not the others'.
    own = {
        "path": unquote(call.path),
        "headers": headers,
        "path_params": parameters,
        "state": dict(scope.get("state", {})),
    }
    return Request({**scope, **own}, receive)
