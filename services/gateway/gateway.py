"""One gateway's life: it looks for servers, and has its parts as long as its application lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from services.app import Stop
from services.directory import ServiceRecord, announced
from services.doorkeeper import Doorkeeper
from services.gateway.failover import Failover
from services.gateway.placing import Placer
from services.gateway.proxy import Proxy
from services.gateway.servers import Servers
from services.gateway.session_index import SessionIndex
from services.gateway.upstream import Upstream
from services.key_rules import NO_KEYS, Keys
from services.redis_client import connect
from services.registry import Registry
from services.settings import GatewaySettings
from services.tls import PUBLIC, Trust
from services.tracing import NO_TRACING, Tracing
from services.waits import WaitBoard
from services.wire.errors import NotReadyError, RollmeshError

_log = structlog.get_logger()


@dataclass(frozen=True)
class GatewayPlan:
    """What a gateway is told at its start."""

    run_id: str
    redis_url: str
    settings: GatewaySettings
    name: str = "gateway"
    """On the wait board and in the directory."""
    url: str | None = None
    """Where it is reached; None: it does not stand in the directory."""
    keys: Keys = NO_KEYS
    """What callers must show (`services.key_rules`); session keys are judged by the servers."""
    tracing: Tracing = NO_TRACING
    trust: Trust = PUBLIC
    """Which certificates of servers it takes."""


@dataclass(frozen=True)
class GatewayParts:
    """What lives as long as the application."""

    servers: Servers
    upstream: Upstream
    failover: Failover
    proxy: Proxy


class Gateway:
    """Owns the parts and the task that looks for servers. An ASGI application: the proxied paths."""

    def __init__(self, plan: GatewayPlan, stop: Stop) -> None:
        self._plan = plan
        self.doors = Doorkeeper(plan.keys)
        self._stop = stop
        self._parts: GatewayParts | None = None

    def parts(self) -> GatewayParts:
        """The parts. Raises NotReadyError before the application has begun."""
        if self._parts is None:
            raise NotReadyError("the gateway is starting", "try again")
        return self._parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.parts().proxy(scope, receive, send)

    def not_ready(self) -> list[str]:
        """Why the gateway cannot do its work; nothing when it can."""
        return ["starting"] if self._parts is None else self._parts.servers.not_ready()

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """The application's lifespan."""
        plan, settings = self._plan, self._plan.settings
        async with AsyncExitStack() as stack:
            redis = connect(plan.redis_url)
            stack.push_async_callback(redis.aclose)
            upstream = await stack.enter_async_context(Upstream(plan.trust))
            board = WaitBoard(redis, plan.run_id, plan.name)
            servers = Servers(Registry(redis, plan.run_id), board, settings.poll_s)
            placer = Placer(servers, settings)
            failover = Failover(servers, placer, upstream, settings.failover_timeout_s)
            # Before the first call: a gateway that has just started knows its servers.
            await servers.look()
            proxy = Proxy(failover, placer, SessionIndex(redis, plan.run_id))
            self._parts = GatewayParts(servers, upstream, failover, proxy)
            if plan.url is not None:
                record = ServiceRecord(name=plan.name, kind="gateway", url=plan.url)
                await stack.enter_async_context(announced(redis, plan.run_id, record))
            looking = asyncio.create_task(self._look(servers), name="looking for servers")
            try:
                yield
            finally:
                looking.cancel()
                with suppress(asyncio.CancelledError):
                    await looking

    async def _look(self, servers: Servers) -> None:
        try:
            await servers.run()
        except Exception as error:  # noqa: BLE001 - a bug: said with its traceback, and the process must not linger
            _log.exception("gateway failed")
            self._stop.fail(RollmeshError(f"the gateway failed ({error!r})", "see its log"))
