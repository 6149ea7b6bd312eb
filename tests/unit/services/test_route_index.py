"""Routing by look-up gives every answer that routing by asking one route after the other gives."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from services.http.route_index import Direct, index_routes

ROUTES = [
    ("GET", "/"),
    ("GET", "/groups"),
    ("POST", "/groups"),
    ("GET", "/groups/{group_id}"),
    ("GET", "/groups/newest"),  # never reached: the one before it fits
    ("POST", "/groups/{group_id}/turns"),
    ("POST", "/groups/open/{verb}"),
    ("GET", "/sessions/mine"),
    ("GET", "/sessions/{session_id}"),
    ("DELETE", "/sessions/{session_id}"),
    ("GET", "/{kind}/{number}/of"),
]
AFTERWARDS = [
    ("GET", "/files/{path:path}"),  # not understood: from here on routes are asked
    ("GET", "/files/one"),
    ("GET", "/numbers/{number:int}"),
    ("GET", "/names/{first}-{last}"),
]
DIRECT = [
    ("POST", "/direct"),
    ("GET", "/direct/{first}"),
    ("GET", "/direct/{first}/{second}"),
    ("POST", "/direct/{first}/refused"),
    ("GET", "/direct/newest"),  # never reached
]
PARTS = ["", "groups", "newest", "open", "sessions", "mine", "turns", "of", "files", "numbers", "7", "names", "a-b"]
PARTS += ["direct", "refused", "%2F", "a%2Fb", "gr%C3%BC%C3%9Fe", "{}", "{group_id}"]


class DirectRoute(Route):
    """`services.http.route_index.Direct`, and a route of the framework's as well."""

    async def respond(self, request: Request) -> Response:
        response: Response = await self.endpoint(request)
        return response


async def told(request: Request) -> Response:
    body = await request.body()
    return JSONResponse({"parameters": request.path_params, "bytes": len(body), "route": request.scope["path"]})


async def refused(request: Request) -> Response:
    raise KeyError(request.path_params["first"])


def application(*, indexed: bool) -> FastAPI:
    app = FastAPI()

    def add(method: str, path: str) -> None:
        async def answer(request: Request) -> dict[str, Any]:
            return {"route": f"{method} {path}", "parameters": request.path_params}

        app.add_api_route(path, answer, methods=[method])

    for method, path in ROUTES + AFTERWARDS:
        add(method, path)
    for method, path in DIRECT:
        app.router.routes.append(DirectRoute(path, refused if path.endswith("refused") else told, methods=[method]))

    @app.exception_handler(LookupError)
    async def on_lookup(request: Request, error: LookupError) -> JSONResponse:
        return JSONResponse({"path": request.url.path, "why": str(error)}, status_code=404)

    if indexed:
        index_routes(app)
    add("GET", "/groups/late/one")
    return app


PLAIN, INDEXED = application(indexed=False), application(indexed=True)


async def answer_of(app: FastAPI, method: str, path: str) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport) as http:
        # Not by a base address: one that begins with two slashes would be taken for a host.
        answer = await http.request(method, f"http://service{path}")
    return answer.status_code, answer.content, answer.headers.raw


@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT"]),
    parts=st.lists(st.sampled_from(PARTS), max_size=4),
)
async def test_the_answer_is_that_of_an_application_without_it(method: str, parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    assert await answer_of(INDEXED, method, path) == await answer_of(PLAIN, method, path)


def test_the_direct_routes_are_direct() -> None:
    assert sum(isinstance(route, Direct) for route in INDEXED.router.routes) == len(DIRECT)


async def test_a_direct_route_is_called_without_the_frameworks_exit_stacks() -> None:
    seen: list[set[str]] = []

    async def look(request: Request) -> Response:
        seen.append({name for name in request.scope if "astack" in name})
        return Response()

    app = FastAPI()
    app.router.routes.append(DirectRoute("/look", look, methods=["GET"]))
    await answer_of(app, "GET", "/look")
    index_routes(app)
    app.middleware_stack = None
    await answer_of(app, "GET", "/look")
    assert seen[0] and not seen[1]


@pytest.mark.parametrize(("method", "path"), [*ROUTES, *AFTERWARDS])
async def test_each_route_is_found(method: str, path: str) -> None:
    filled = path.replace("{number:int}", "7").replace("{path:path}", "a/b").replace("{first}-{last}", "a-b")
    for name in ("group_id", "session_id", "verb", "kind", "number"):
        filled = filled.replace(f"{{{name}}}", name)
    status, content, headers = await answer_of(INDEXED, method, filled)
    assert status == 200
    assert (status, content, headers) == await answer_of(PLAIN, method, filled)
