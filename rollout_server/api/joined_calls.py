"""`POST /calls`: several calls of a runner in one request, each as if it had come alone (`services.http.joined_calls`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter, Request, Response
from starlette.types import Message, Scope

from rollout_server.api.routes import ERRORS, Ready, RolloutRoute
from rollout_server.sessions.access import Access
from services.http.connection import Caller
from services.http.joined_calls import CallsInOne, Lines, read_given_up, read_joined, scope_of
from services.http.route_index import respond
from services.http.struct_answer import takes
from services.wire.errors import NotFoundError
from services.wire.joined_calls import GIVEN_UP, JOINED, LINES, PATH, GivenUp, JoinedCall, JoinedCalls, may_be_joined


def joined_routes(access: Ready[Access], routes: Sequence[Any], handlers: Mapping[Any, Any]) -> APIRouter:
    """`routes`: the application's, those of JOINED among them; `handlers`: of errors, as the application has them."""
    router = APIRouter(route_class=RolloutRoute, tags=["rollout"], responses=ERRORS)
    joined = [route for route in routes if isinstance(route, RolloutRoute) and route.path in JOINED]

    async def answer(call: JoinedCall, caller: Caller, scope: Scope) -> Response:
        route, parameters = _find(joined, call.path)
        own = scope_of(call, caller, scope) | {"path_params": parameters}

        async def receive() -> Message:
            return {"type": "http.request", "body": bytes(call.body), "more_body": False}

        return await respond(route, Request(own, receive), handlers)

    calls = CallsInOne(answer)

    @router.post(
        PATH,
        response_class=Response,
        responses={200: {"description": "A line a call, in the order of their ends", "content": {LINES: {}}}},
        openapi_extra=takes(JoinedCalls),
    )
    async def call_joined(request: Request) -> Response:
        """Open or finish groups, or take turns in them, several calls at once: each as by its own route."""
        access().require_agent(request)
        return Lines(
            calls.answers(read_joined(request.headers.get("content-type"), await request.body()), request.scope)
        )

    @router.post(GIVEN_UP, status_code=204, openapi_extra=takes(GivenUp))
    async def give_up(request: Request) -> Response:
        """End those of the joined calls with these names that are not answered yet: nobody waits for them any more."""
        access().require_agent(request)
        calls.give_up(read_given_up(request.headers.get("content-type"), await request.body()))
        return Response(status_code=204)

    return router


def _find(routes: Sequence[RolloutRoute], path: str) -> tuple[RolloutRoute, dict[str, str]]:
    for route in routes if may_be_joined(path) else ():
        if (match := route.path_regex.fullmatch(unquote(path))) is not None:
            return route, match.groupdict()
    raise NotFoundError(f"{path!r} is no path that {PATH} takes", f"it takes {' and '.join(JOINED)}")
