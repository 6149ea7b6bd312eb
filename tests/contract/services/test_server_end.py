"""The end of an HTTP service: no new connections, calls in flight go on, then the application is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from services.http.app import Stop, make_app, make_server, open_port
from tests.support.until import until

_WITHIN_S = 20.0


@dataclass
class Service:
    """One that answers `/wait` once `go` is set. `seen`: what happened in it, in order."""

    url: str
    server: uvicorn.Server
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
        server.should_exit = True
        await serving


async def _takes_no_more(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as http:
            await http.get(f"{url}/livez")
    except httpx.ConnectError:
        return True
    return False


def _here(server: uvicorn.Server) -> None:
    server.should_exit = True


async def _by_a_thread(server: uvicorn.Server) -> None:
    await asyncio.to_thread(_here, server)


async def _by_the_loop(server: uvicorn.Server) -> None:
    _here(server)


@pytest.mark.parametrize("tell", [_by_the_loop, _by_a_thread], ids=["loop", "thread"])
async def test_calls_in_flight_are_answered_and_idle_connections_closed(
    tell: Callable[[uvicorn.Server], Awaitable[None]],
) -> None:
    async with running(shutdown_s=20) as (service, serving), httpx.AsyncClient(timeout=_WITHIN_S) as http:
        assert (await http.get(f"{service.url}/livez")).status_code == 200  # kept, and idle from here on
        async with httpx.AsyncClient(timeout=_WITHIN_S) as other:
            asking = asyncio.create_task(other.get(f"{service.url}/wait"))
            await until(lambda: service.seen == ["asked"])
            await tell(service.server)
            await until(lambda: _takes_no_more(service.url))
            assert service.seen == ["asked", "told"]
            service.go.set()
            answer = await asking
            assert (answer.status_code, answer.json()) == (200, "done")
            async with asyncio.timeout(_WITHIN_S):
                await serving
    assert service.seen == ["asked", "told", "answered", "closed"]


async def test_a_call_that_outlasts_its_time_is_ended_before_the_application_is_closed() -> None:
    async with running(shutdown_s=0) as (service, serving), httpx.AsyncClient(timeout=_WITHIN_S) as http:
        asking = asyncio.create_task(http.get(f"{service.url}/wait"))
        await until(lambda: service.seen == ["asked"])
        service.server.should_exit = True
        async with asyncio.timeout(_WITHIN_S):
            await serving
        (failed,) = await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(failed, httpx.TransportError) or (
            isinstance(failed, httpx.Response) and failed.status_code == 500
        )
    assert service.seen == ["asked", "told", "ended", "closed"]


async def test_told_twice_it_waits_for_nothing() -> None:
    async with running(shutdown_s=3600) as (service, serving), httpx.AsyncClient(timeout=_WITHIN_S) as http:
        asking = asyncio.create_task(http.get(f"{service.url}/wait"))
        await until(lambda: service.seen == ["asked"])
        service.server.should_exit = True
        await until(lambda: "told" in service.seen)
        service.server.force_exit = True
        async with asyncio.timeout(_WITHIN_S):
            await serving
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
