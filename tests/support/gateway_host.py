"""A gateway on a real socket inside the test's event loop, in front of whatever announces itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from services.config.settings import GatewaySettings
from services.gateway.app import GatewayPlan, make_gateway_app
from services.http.app import Stop, make_server, open_port
from services.run_store.client import connect
from services.run_store.discovery import ServiceRegistry
from services.security.tls import PLAIN, Tls
from tests.support.fake_servers import FakeServer, fake_servers
from tests.support.served_app import context_of
from tests.support.until import until


@dataclass
class GatewayHost:
    """A gateway that is up, and a client of it."""

    http: httpx.AsyncClient
    url: str
    registry: ServiceRegistry

    async def servers(self) -> list[dict[str, Any]]:
        """`GET /admin/servers`."""
        found: list[dict[str, Any]] = (await self.http.get("/admin/servers")).json()["servers"]
        return found

    async def until_known(self, **states: str) -> None:
        """Wait until the gateway sees exactly these servers in these states."""

        async def known() -> bool:
            return {each["server_id"]: each["state"] for each in await self.servers()} == states

        await until(known)

    async def open(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/sessions", json=body)
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()
        return opened


@asynccontextmanager
async def gateway(redis_url: str, run_id: str, *, tls: Tls = PLAIN, **settings: Any) -> AsyncIterator[GatewayHost]:
    """A gateway of the run; `settings` are `GatewaySettings`."""
    listener = open_port("127.0.0.1", 0)
    url = f"{tls.scheme}://127.0.0.1:{listener.getsockname()[1]}"
    chosen = GatewaySettings(**{"poll_s": 0.02, "failover_timeout_s": 3.0} | settings)
    plan = GatewayPlan(run_id=run_id, redis_url=redis_url, settings=chosen, trust=tls.trust)
    stop = Stop()
    server = make_server(make_gateway_app(plan, stop, max_body_mib=1), stop, identity=tls.identity)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    redis = connect(redis_url)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20.0, verify=context_of(tls.trust)) as http:
            await until(lambda: server.started)
            yield GatewayHost(http, url, ServiceRegistry(redis, run_id))
    finally:
        server.should_exit = True
        await serving
        await redis.aclose()


@asynccontextmanager
async def mesh(
    redis_url: str, run_id: str, names: str = "ab", **settings: Any
) -> AsyncIterator[tuple[GatewayHost, list[FakeServer]]]:
    """Fake servers with a gateway in front that knows them all."""
    redis = connect(redis_url)
    try:
        async with fake_servers(names, ServiceRegistry(redis, run_id)) as servers:
            async with gateway(redis_url, run_id, **settings) as host:
                await host.until_known(**dict.fromkeys(names, "serving"))
                yield host, servers
    finally:
        await redis.aclose()
