"""Routing by look-up gives every answer that routing by asking one route after the other gives."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from services.http.route_index import index_routes

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
PARTS = ["", "groups", "newest", "open", "sessions", "mine", "turns", "of", "files", "numbers", "7", "names", "a-b"]
PARTS += ["%2F", "a%2Fb", "gr%C3%BC%C3%9Fe", "{}", "{group_id}"]


def application(*, indexed: bool) -> FastAPI:
    app = FastAPI()

    def add(method: str, path: str) -> None:
        async def answer(request: Request) -> dict[str, Any]:
            return {"route": f"{method} {path}", "parameters": request.path_params}

        app.add_api_route(path, answer, methods=[method])

    for method, path in ROUTES + AFTERWARDS:
        add(method, path)
    if indexed:
        index_routes(app)
    add("GET", "/groups/late/one")
    return app


PLAIN, INDEXED = application(indexed=False), application(indexed=True)


async def answer_of(app: FastAPI, method: str, path: str) -> tuple[int, bytes, list[tuple[bytes, bytes]]]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        answer = await http.request(method, path)
    return answer.status_code, answer.content, answer.headers.raw


@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT"]),
    parts=st.lists(st.sampled_from(PARTS), max_size=4),
)
async def test_the_answer_is_that_of_an_application_without_it(method: str, parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    assert await answer_of(INDEXED, method, path) == await answer_of(PLAIN, method, path)


@pytest.mark.parametrize(("method", "path"), [*ROUTES, *AFTERWARDS])
async def test_each_route_is_found(method: str, path: str) -> None:
    filled = path.replace("{number:int}", "7").replace("{path:path}", "a/b").replace("{first}-{last}", "a-b")
    for name in ("group_id", "session_id", "verb", "kind", "number"):
        filled = filled.replace(f"{{{name}}}", name)
    status, content, headers = await answer_of(INDEXED, method, filled)
    assert status == 200
    assert (status, content, headers) == await answer_of(PLAIN, method, filled)
