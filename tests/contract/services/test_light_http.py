"""The dashboard's cheap HTTP transport tells of a service what httpx's own tells, whatever became of the call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request

from services.dashboard.look.light_http import LightTransport
from services.http.app import make_app
from services.observability.mesh_status.collector import Probe, probe_all
from services.observability.run_view.observer import Observer
from services.run_store.client import connect
from tests.conftest import free_port
from tests.support.dashboard_runs import engine_app, nothing
from tests.support.served_app import served


@asynccontextmanager
async def breaking_off() -> AsyncIterator[str]:
    """Where each answer ends in its middle."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_probe_finds_what_httpx_finds() -> None:
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        urls = {
            "ready": await stack.enter_async_context(served(make_app("s", "0", nothing, list))),
            "waiting": await stack.enter_async_context(served(make_app("s", "0", nothing, lambda: ["no server"]))),
            "gone": f"http://127.0.0.1:{free_port()}",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "breaks off": await stack.enter_async_context(breaking_off()),
            "unknown": "http://no-such-host.invalid",
        }
        urls["no TLS"] = urls["ready"].replace("http:", "https:")
        light = await stack.enter_async_context(httpx.AsyncClient(transport=LightTransport(), trust_env=False))
        usual = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        found, expected = await asyncio.gather(probe_all(light, urls), probe_all(usual, urls))
        again = await probe_all(light, {"ready": urls["ready"]})
    assert {name: each.outcome for name, each in found.items()} == {
        name: each.outcome for name, each in expected.items()
    }
    assert found["ready"] == again["ready"] == Probe("ready")
    assert found["waiting"] == Probe("not_ready", ("no server",))
    assert (found["gone"].outcome, found["silent"].outcome) == ("refused", "silent")
    assert found["no TLS"] == expected["no TLS"] and "speaks no TLS" in found["no TLS"].reasons[0]


async def test_a_call_carries_its_headers_and_body_and_brings_the_answers() -> None:
    app = make_app("s", "0", nothing, list)

    @app.post("/echo", status_code=201)
    async def echo(request: Request) -> dict[str, str | None]:
        return {"body": (await request.body()).decode(), "key": request.headers.get("authorization")}

    shown = {"authorization": "Bearer k"}
    async with served(app) as url, httpx.AsyncClient(transport=LightTransport(), headers=shown) as http:
        answer = await http.post(f"{url}/echo", content=b"told")
    assert (answer.status_code, answer.json()) == (201, {"body": "told", "key": "Bearer k"})
    assert answer.headers["content-type"] == "application/json"


async def test_engines_are_asked_anew_when_they_are_others_or_time_has_passed(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    asked: list[str] = []

    def engine(name: str) -> FastAPI:
        app = engine_app(name, 1)

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Any:
            asked.append(name)
            return await call_next(request)

        return app

    redis = connect(redis_url)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(served(engine(name))) for name in ("s0", "s1")]
        http = await stack.enter_async_context(httpx.AsyncClient(transport=LightTransport()))
        observer = Observer(
            began_at=0.0, steps=1, k=1, folder=None, run_id=run_id, redis=redis, http=http, urls=urls[:1],
            engines_every_s=60.0,
        )  # fmt: skip
        for _ in range(3):
            snapshot = await observer.collect()
        assert ([each.server_id for each in snapshot.engines], asked) == (["s0"], ["s0"])
        observer.urls = urls
        snapshot = await observer.collect()
        assert [each.server_id for each in snapshot.engines] == ["s0", "s1"]
    await redis.aclose()
