"""The gateway's HTTP application: its own few routes, and in front of them the proxied paths."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version

import structlog
from fastapi import APIRouter, FastAPI, Request
from starlette.types import Receive, Scope, Send

from services.config.settings import GatewaySettings
from services.gateway.proxy import Proxy, ProxyPaths
from services.gateway.request import SessionIndex
from services.gateway.retry import Failover
from services.gateway.router import Router
from services.gateway.servers import Server, Servers
from services.gateway.upstream import Upstream
from services.http.app import BodyLimit, Stop, make_app
from services.http.auth import AuthMiddleware, Authorizer
from services.observability import catalog
from services.observability.metrics import Metrics, Reading
from services.observability.middleware import trace_calls
from services.observability.tracing import NO_TRACING, Tracing
from services.run_store.client import connect
from services.run_store.discovery import ServiceRecord, ServiceRegistry, announced
from services.run_store.status import WaitBoard
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PUBLIC, Trust
from services.wire.errors import NotFoundError, NotReadyError, RollmeshError
from services.wire.gateway_api import Draining, DrainServer, KnownServer, KnownServers
from services.wire.rollout_api import RunState


def make_gateway_app(plan: GatewayPlan, stop: Stop, *, max_body_mib: int) -> FastAPI:
    """The application; bodies may be as large as the servers take them."""
    gateway = Gateway(plan, stop)
    metrics = Metrics()
    metrics.read(lambda: gateway_readings(gateway))
    scraping = gateway.authorizer.of("service")
    app = make_app(
        *("rollmesh gateway", version("rollmesh"), gateway.lifespan, gateway.not_ready, metrics),
        metrics_access=scraping,
    )
    app.include_router(run_routes(gateway))
    # Last: it answers every path that nobody else does.
    app.include_router(admin_routes(gateway))
    app.add_middleware(ProxyPaths, proxy=BodyLimit(gateway, max_body_mib << 20))
    trace_calls(app, plan.tracing)
    app.add_middleware(AuthMiddleware, authorizer=gateway.authorizer, sessions=True)
    return app


# One gateway's life: it looks for servers, and has its parts as long as its application lives.

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
    """What callers must show (`services.security.permissions`); session keys are judged by the servers."""
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
        self.authorizer = Authorizer(plan.keys)
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
            servers = Servers(ServiceRegistry(redis, plan.run_id), board, settings.poll_s)
            router = Router(servers, settings)
            failover = Failover(servers, router, upstream, settings.failover_timeout_s)
            # Before the first call: a gateway that has just started knows its servers.
            await servers.look()
            proxy = Proxy(failover, router, SessionIndex(redis, plan.run_id))
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


# Routes for whoever operates the mesh: which servers there are, and letting one go.

_ANNOUNCED = [name for name in KnownServer.model_fields if name not in ("server_id", "in_flight")]
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def admin_routes(gateway: Gateway) -> APIRouter:
    """The gateway's own routes; what is neither theirs nor proxied is answered with where it belongs."""
    router = APIRouter(tags=["admin"])

    @router.get("/admin/servers", dependencies=gateway.authorizer.of("service"))
    async def read_servers() -> KnownServers:
        """The servers that are alive, as they announce themselves and as this gateway uses them."""
        servers = gateway.parts().servers
        known = [
            KnownServer(
                server_id=server.name,
                **{name: getattr(server.record, name) for name in _ANNOUNCED},
                in_flight=server.in_flight,
            )
            for server in servers.all()
        ]
        return KnownServers(servers=known, not_ready=servers.not_ready())

    @router.post("/admin/drain", status_code=202, dependencies=gateway.authorizer.of("operator"))
    async def drain(call: DrainServer, request: Request) -> Draining:
        """Have a server let go of its sessions, which others take up, and end. The caller's own key is shown to it."""
        parts = gateway.parts()
        server = parts.servers.named(call.server_id)
        if server is None:
            known = ", ".join(each.name for each in parts.servers.all()) or "none"
            raise NotFoundError(f"no rollout server {call.server_id!r} is alive", f"known: {known}")
        content = await parts.upstream.ask(server, "POST", "/admin/drain", request.headers.get("authorization"))
        return Draining.model_validate_json(content)

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def elsewhere(path: str) -> None:
        raise NotFoundError(
            f"the gateway has no /{path}",
            "operate an engine at its rollout server itself: GET /admin/servers has its url",
        )

    return router


# `GET /run` of a mesh: what is true of all its servers, not of the one that a call happens to meet.


def run_routes(gateway: Gateway) -> APIRouter:
    """The one route of agents that is answered by the gateway itself."""
    router = APIRouter(tags=["rollout"], dependencies=gateway.authorizer.of("reading"))

    @router.get("/run")
    async def read_run(request: Request) -> RunState:
        """The run as the server with the oldest policy sees it: whoever waits for new weights waits for all servers."""
        parts = gateway.parts()

        async def ask(server: Server) -> RunState | None:
            try:
                content = await parts.upstream.ask(server, "GET", "/run", request.headers.get("authorization"))
            except RollmeshError:
                return None  # it is on its way out, or in: the others serve
            return RunState.model_validate_json(content)

        states = [state for state in await asyncio.gather(*map(ask, parts.servers.serving())) if state is not None]
        if not states:
            raise NotReadyError("no rollout server says how far the run is", "try again; see GET /admin/servers")
        return min(states, key=lambda state: state.policy_version)

    return router


# A gateway's figures, read off it when somebody scrapes.


def gateway_readings(gateway: Gateway) -> Iterator[Reading]:
    """The servers that it knows and the calls that it has sent them; none before the application has begun."""
    try:
        parts = gateway.parts()
    except NotReadyError:
        return
    known = parts.servers.all()
    states = Counter({"serving": 0, "draining": 0})
    states.update(server.record.state for server in known)
    for state, count in states.items():
        yield Reading(catalog.GATEWAY_SERVERS, count, (state,))
    for server in known:
        yield Reading(catalog.GATEWAY_IN_FLIGHT, server.in_flight, (server.name,))
    for name, count in parts.failover.failed_tries.items():
        yield Reading(catalog.GATEWAY_RESENT, count, (name,))
