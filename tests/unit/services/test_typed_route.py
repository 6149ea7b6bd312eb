"""`services.http.typed_route`: dependencies are asked before a body is read; what cannot be asked is refused when made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated

import httpx
import msgspec
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.exceptions import FastAPIError
from fastapi.security import HTTPBearer
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict, Field

from services.http.route_index import index_routes
from services.http.struct_answer import struct_answer
from services.http.typed_route import TypedRoute, answer


class Number(BaseModel):
    number: int


@dataclass
class Plain:
    __pydantic_config__ = ConfigDict(extra="forbid")
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("it is below zero")


class Inner(BaseModel):
    size: int = Field(ge=1)


class Struct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    numbers: list[Annotated[int, msgspec.Meta(ge=0)]]
    inner: Inner | None = None


async def needs_word(request: Request) -> None:
    if request.headers.get("x-word") != "sesame":
        raise HTTPException(403, "no")


def an_app(*, indexed: bool) -> FastAPI:
    app, router = (
        FastAPI(),
        APIRouter(
            prefix="/n",
            route_class=TypedRoute,
            dependencies=[Depends(needs_word), Depends(HTTPBearer(auto_error=False))],
        ),
    )

    @router.post("/double", response_model=Number)
    async def double(call: Number) -> Response:
        return answer(Number(number=2 * call.number))

    @router.post("/treble", response_model=Plain)
    async def treble(call: Plain) -> Response:
        return struct_answer(Plain(3 * call.number), 201)

    @router.post("/sum/{name}", response_model=Number)
    async def add(name: str, call: Struct, request: Request) -> Response:
        assert request.path_params == {"name": name}
        return answer(Number(number=sum(call.numbers) + (0 if call.inner is None else call.inner.size)))

    app.router.routes.extend(router.routes)
    if indexed:
        index_routes(app)
    return app


@pytest.mark.parametrize("indexed", [False, True])
async def test_a_dependency_is_asked_before_the_body_is_looked_at(indexed: bool) -> None:
    app = an_app(indexed=indexed)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        word = {"x-word": "sesame"}
        assert (await client.post("/n/double", json={"number": 4}, headers=word)).json() == {"number": 8}
        assert (await client.post("/n/double", json={"number": 4})).status_code == 403
        assert (await client.post("/n/double", content=b"junk")).status_code == 403
        assert (await client.post("/n/double", json={"number": "x"}, headers=word)).status_code == 422
    described = app.openapi()["paths"]["/n/double"]["post"]
    assert described["security"] == [{"HTTPBearer": []}], "it still says how a key is shown"
    assert described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Number")


async def test_a_body_may_be_a_dataclass() -> None:
    app = an_app(indexed=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        word = {"x-word": "sesame"}
        trebled = await client.post("/n/treble", json={"number": 4}, headers=word)
        assert (trebled.status_code, trebled.json()) == (201, {"number": 12})
        for wrong in ({"number": "x"}, {"number": 1, "more": 2}, {"number": -1}, [], {}):
            assert (await client.post("/n/treble", json=wrong, headers=word)).status_code == 422, wrong
    described = app.openapi()["paths"]["/n/treble"]["post"]["requestBody"]["content"]["application/json"]
    assert described["schema"]["$ref"].endswith("/Plain")


async def test_a_body_may_be_a_struct_with_a_model_in_it() -> None:
    app = an_app(indexed=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        word = {"x-word": "sesame"}
        for body, total in (({"numbers": [1, 2]}, 3), ({"numbers": ["4"], "inner": {"size": 2}}, 6)):
            added = await client.post("/n/sum/a", json=body, headers=word)
            assert (added.status_code, added.json()) == (200, {"number": total})
        for wrong, place in (
            ({"numbers": [1, -2]}, ["body", "numbers", "1"]),
            ({"numbers": [1], "more": 2}, ["body"]),
            ({"numbers": [1], "inner": {"size": 0}}, ["body", "inner"]),
            ({}, ["body"]),
            ([], ["body"]),
        ):
            refused = await client.post("/n/sum/a", json=wrong, headers=word)
            assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, place), wrong
        small = (await client.post("/n/sum/a", json={"numbers": [], "inner": {"size": 0}}, headers=word)).json()
        assert small["detail"][0]["msg"] == "size: Input should be greater than or equal to 1"
        for junk in (b"{", b"\xff", b'{"numbers": ' + b"[" * 100_000):
            content = {**word, "content-type": "application/json"}
            assert (await client.post("/n/sum/a", content=junk, headers=content)).status_code == 422, junk[:20]
        assert (await client.post("/n/sum/a", content=b"{}", headers=word)).status_code == 422, "no content type"
        assert (await client.post("/n/sum/a", json={"numbers": []})).status_code == 403
    described = app.openapi()["paths"]["/n/sum/{name}"]["post"]
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    assert (schema["title"], schema["properties"]["numbers"]["items"]["minimum"]) == ("Struct", 0)
    assert "size" in json.dumps(schema["properties"]["inner"])
    assert [each["name"] for each in described["parameters"]] == ["name"]


def test_a_router_with_a_struct_may_be_included_in_another() -> None:
    inner = APIRouter(route_class=TypedRoute)

    @inner.post("/x")
    async def take(call: Struct) -> Response:
        return Response(str(call.numbers))

    app = FastAPI()
    app.include_router(inner, prefix="/a")
    with TestClient(app) as client:
        assert client.post("/a/x", json={"numbers": [1]}).text == "[1]"


def by_header(word: str = Header()) -> None:
    del word


def by_query(word: str = Query()) -> None:
    del word


async def by_nothing() -> None:
    return


class OwnScheme(HTTPBearer):
    """It might check something."""


@pytest.mark.parametrize(
    "dependency",
    [by_header, by_query, by_nothing, HTTPBearer(), OwnScheme(auto_error=False), lambda request: None],
    ids=["header", "query", "nothing", "refusing scheme", "another's scheme", "no coroutine"],
)
def test_what_would_not_be_asked_is_refused(dependency: object) -> None:
    router = APIRouter(route_class=TypedRoute, dependencies=[Depends(dependency)])  # type: ignore[arg-type]

    async def endpoint() -> Response:
        return Response()

    with pytest.raises(TypeError, match="dependencies are coroutine functions of the request"):
        router.get("/x")(endpoint)


def test_an_endpoint_that_wants_more_than_its_call_gives_is_refused() -> None:
    router = APIRouter(route_class=TypedRoute)

    async def endpoint(word: str = Header()) -> Response:
        return Response(word)

    with pytest.raises(TypeError, match="path parameters, one body and the request only"):
        router.get("/x")(endpoint)


def test_a_second_struct_is_refused() -> None:
    router = APIRouter(route_class=TypedRoute)

    async def endpoint(one: Struct, two: Struct) -> Response:
        return Response(str((one, two)))

    with pytest.raises(FastAPIError):
        router.post("/x")(endpoint)
