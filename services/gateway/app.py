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

from services.config.settings import GatewaySettings
from services.gateway.proxy import Proxy, ProxyPaths
from services.gateway.request import SessionIndex
from services.gateway.retry import Failover
from services.gateway.router import Router
from services.gateway.servers import Server, Servers
from services.gateway.session_keys import IssuedKeys
from services.gateway.undelivered import Undelivered
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
from services.security.permissions import NO_KEYS, Keys, environment_key
from services.security.tls import PUBLIC, Trust
from services.wire.errors import NotFoundError, NotReadyError, RollmeshError
from services.wire.gateway_api import Draining, DrainServer, KnownServer, KnownServers
from services.wire.rollout_api import RunState


def make_gateway_app(plan: GatewayPlan, stop: Stop, *, max_body_mib: int) -> FastAPI:
    """The application; bodies may be as large as the servers take them."""
    gateway, authorizer = Gateway(plan, stop), Authorizer(plan.keys)
    metrics = Metrics()
    metrics.read(lambda: gateway_readings(gateway.servers, gateway.failover))
    app = make_app(
        "rollmesh gateway",
        version("rollmesh"),
        gateway.lifespan,
        gateway.servers.not_ready,
        metrics,
        metrics_access=authorizer.of("metrics"),
    )
    app.include_router(run_routes(gateway.servers, gateway.upstream, authorizer))
    # Last: it answers every path that no other route takes.
    app.include_router(admin_routes(gateway.servers, gateway.upstream, authorizer))
    app.add_middleware(ProxyPaths, proxy=BodyLimit(gateway.proxy, max_body_mib << 20))
    trace_calls(app, plan.tracing)
    app.add_middleware(AuthMiddleware, authorizer=authorizer, issued=gateway.issued)
    return app


_log = structlog.get_logger()


@dataclass(frozen=True)
class GatewayPlan:
    """What a gateway is told at its start."""

    run_id: str
    redis_url: str
    settings: GatewaySettings
    name: str = "gateway"
    """On the wait board and in service discovery."""
    url: str | None = None
    """Where it is reached; None: it is not listed in service discovery."""
    keys: Keys = NO_KEYS
    """What callers must show (`services.security.permissions`). The session key is the servers'."""
    tracing: Tracing = NO_TRACING
    trust: Trust = PUBLIC
    """Which certificates of servers it takes."""


class Gateway:
    """Owns a gateway's parts and the tasks that poll the registry for servers and note calls that were given up."""

    def __init__(self, plan: GatewayPlan, stop: Stop) -> None:
        self._plan = plan
        self._stop = stop
        self._redis = redis = connect(plan.redis_url)
        board = WaitBoard(redis, plan.run_id, plan.name)
        self.servers = Servers(ServiceRegistry(redis, plan.run_id), board, plan.settings.poll_s)
        self.upstream = Upstream(plan.trust)
        router = Router(self.servers, plan.settings)
        self.failover = Failover(
            self.servers, router, self.upstream, plan.settings.failover_timeout_s, environment_key(plan.keys)
        )
        self._undelivered = Undelivered(redis, plan.run_id)
        sessions = SessionIndex(redis, plan.run_id)
        self.proxy = Proxy(self.failover, router, sessions, self._undelivered, Authorizer(plan.keys))
        self.issued = IssuedKeys(redis, plan.run_id, plan.keys)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """The application's lifespan."""
        plan = self._plan
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._redis.aclose)
            await stack.enter_async_context(self.upstream)
            stack.push_async_callback(self.failover.aclose)
            # Before the first call: a gateway that has just started knows its servers.
            await self.servers.refresh()
            if plan.url is not None:
                record = ServiceRecord(name=plan.name, kind="gateway", url=plan.url)
                await stack.enter_async_context(announced(self._redis, plan.run_id, record))
            running = asyncio.create_task(self._run(), name="polling servers, noting calls")
            try:
                yield
            finally:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.servers.run())
                tasks.create_task(self._undelivered.run())
        except Exception as error:  # noqa: BLE001 - a bug: said with its traceback, and the process must end
            _log.exception("gateway failed")
            self._stop.fail(RollmeshError(f"the gateway failed ({error!r})", "see its log"))


_ANNOUNCED = [name for name in KnownServer.model_fields if name not in ("server_id", "in_flight")]
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def admin_routes(servers: Servers, upstream: Upstream, authorizer: Authorizer) -> APIRouter:
    """Routes for operators: list the servers, drain one. What no other route takes is answered with where it belongs."""
    router = APIRouter(tags=["admin"])

    @router.get("/admin/servers", dependencies=authorizer.of("service"))
    async def read_servers() -> KnownServers:
        """The servers that are alive, as they announce themselves and as this gateway uses them."""
        known = [
            KnownServer(
                server_id=server.name,
                **{name: getattr(server.record, name) for name in _ANNOUNCED},
                in_flight=server.in_flight,
            )
            for server in servers.all()
        ]
        return KnownServers(servers=known, not_ready=servers.not_ready())

    @router.post("/admin/drain", status_code=202, dependencies=authorizer.of("operator"))
    async def drain(call: DrainServer, request: Request) -> Draining:
        """Have a server release its sessions, which others take over, and end. The caller's own key is shown to it."""
        server = servers.named(call.server_id)
        if server is None:
            known = ", ".join(each.name for each in servers.all()) or "none"
            raise NotFoundError(f"no rollout server {call.server_id!r} is alive", f"known: {known}")
        content = await upstream.ask(server, "POST", "/admin/drain", request.headers.get("authorization"))
        return Draining.model_validate_json(content)

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def elsewhere(path: str) -> None:
        raise NotFoundError(
            f"the gateway has no /{path}",
            "operate an engine at its rollout server itself: GET /admin/servers has its url",
        )

    return router


def run_routes(servers: Servers, upstream: Upstream, authorizer: Authorizer) -> APIRouter:
    """`GET /run` of a mesh, answered by the gateway itself: true of all servers, not of the one that a call meets."""
    router = APIRouter(tags=["rollout"], dependencies=authorizer.of("reading"))

    @router.get("/run")
    async def read_run(request: Request) -> RunState:
        """The run as the server with the oldest policy sees it: waiting for new weights means waiting for all servers."""

        async def ask(server: Server) -> RunState | None:
            try:
                content = await upstream.ask(server, "GET", "/run", request.headers.get("authorization"))
            except RollmeshError:
                return None  # it is on its way out, or in: the others serve
            return RunState.model_validate_json(content)

        states = [state for state in await asyncio.gather(*map(ask, servers.serving())) if state is not None]
        if not states:
            raise NotReadyError("no rollout server says how far the run is", "try again; see GET /admin/servers")
        return min(states, key=lambda state: state.policy_version)

    return router


def gateway_readings(servers: Servers, failover: Failover) -> Iterator[Reading]:
    """A gateway's metrics, read at each scrape: the servers that it knows and the calls that it has sent them."""
    known = servers.all()
    states = Counter({"serving": 0, "draining": 0})
    states.update(server.record.state for server in known)
    for state, count in states.items():
        yield Reading(catalog.GATEWAY_SERVERS, count, (state,))
    for server in known:
        yield Reading(catalog.GATEWAY_IN_FLIGHT, server.in_flight, (server.name,))
    for name, count in failover.failed_tries.items():
        yield Reading(catalog.GATEWAY_RESENT, count, (name,))
