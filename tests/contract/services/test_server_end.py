"""The end of an HTTP service: no new connections, calls in flight go on, then the application is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI

from services.http.app import Stop, make_app, make_server, open_port
from services.http.server import Server
from tests.support.until import until

_WITHIN_S = 20.0


@dataclass
class Service:
    """One that answers `/wait` once `go` is set. `seen`: what happened in it, in order."""

    url: str
    server: Server
    seen: list[str]
    go: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def running(shutdown_s: int) -> AsyncIterator[tuple[Service, asyncio.Task[None]]]:
    stop, listener = Stop(), open_port("127.0.0.1", 0)
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        seen.append("closed")

    app = make_app("rollmesh test", "1", lifespan, lambda: [])
    stop.on_stop = lambda: seen.append("told")
    server = make_server(app, stop, shutdown_s=shutdown_s, takes_signals=False)
    service = Service(f"http://127.0.0.1:{listener.getsockname()[1]}", server, seen)

    @app.get("/wait")
    async def wait() -> str:
        seen.append("asked")
        try:
            await service.go.wait()
        except asyncio.CancelledError:
            seen.append("ended")
            raise
        seen.append("answered")
        return "done"

    serving = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started)
        yield service, serving
    finally:
        server.force_exit = True
        server.end()
        await serving


async def _takes_no_more(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as http:
            await http.get(f"{url}/livez")
    except httpx.ConnectError:
        return True
    return False


@asynccontextmanager
async def in_flight(shutdown_s: int) -> AsyncIterator[tuple[Service, asyncio.Task[None], asyncio.Task[httpx.Response]]]:
    """A service, its run, and a call that waits in it."""
    async with running(shutdown_s) as (service, serving), httpx.AsyncClient(timeout=_WITHIN_S) as http:
        asking = asyncio.create_task(http.get(f"{service.url}/wait"))
        try:
            await until(lambda: service.seen == ["asked"])
            yield service, serving, asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("by_a_thread", [False, True], ids=["loop", "thread"])
async def test_calls_in_flight_are_answered_and_idle_connections_closed(by_a_thread: bool) -> None:
    async with in_flight(shutdown_s=20) as (service, serving, asking), httpx.AsyncClient() as idle:
        assert (await idle.get(f"{service.url}/livez")).status_code == 200  # its connection is kept
        if by_a_thread:
            await asyncio.to_thread(service.server.end)
        else:
            service.server.end()
        await until(lambda: _takes_no_more(service.url))
        assert service.seen == ["asked", "told"]
        service.go.set()
        answer = await asking
        assert (answer.status_code, answer.json()) == (200, "done")
        async with asyncio.timeout(_WITHIN_S):
            await serving
        assert service.seen == ["asked", "told", "answered", "closed"]


async def test_a_call_that_outlasts_its_time_is_ended_before_the_application_is_closed() -> None:
    async with in_flight(shutdown_s=0) as (service, serving, asking):
        service.server.end()
        async with asyncio.timeout(_WITHIN_S):
            await serving
        assert (await asking).status_code == 500
        assert service.seen == ["asked", "told", "ended", "closed"]


async def test_told_twice_it_waits_for_nothing() -> None:
    async with in_flight(shutdown_s=3600) as (service, serving, _):
        service.server.end()
        await until(lambda: "told" in service.seen)
        service.server.force_exit = True
        async with asyncio.timeout(_WITHIN_S):
            await serving
