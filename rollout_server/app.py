"""The rollout server's HTTP application."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from fastapi import FastAPI, Request, Response

from rollout_server.api.bus_weight_updates import ServedWeights
from rollout_server.api.engine_admin import admin_routes, engine_routes
from rollout_server.api.groups import group_routes
from rollout_server.api.openai import completion_routes, model_routes
from rollout_server.api.sessions import session_routes
from rollout_server.api.trajectories import trajectory_routes
from rollout_server.api.typed_route import ERRORS
from rollout_server.api.vllm_weight_updates import weight_update_routes
from rollout_server.engines.base import Engine, EngineCrashedError
from rollout_server.server import RolloutServer, ServerPlan
from services.http.app import BodyLimit, Stop, error_answer, make_app
from services.http.auth import AuthMiddleware
from services.observability import catalog
from services.observability.metrics import Metrics, Reading
from services.observability.middleware import trace_calls
from services.wire.errors import NotReadyError
from weight_bus.client.engine_routes import weight_routes
from weight_bus.client.membership import Bus


def make_rollout_app(plan: ServerPlan, engine: Engine, bus: Bus | None, stop: Stop) -> FastAPI:
    """The application around an engine that has not been started; without a bus it serves the weights it has."""
    server = RolloutServer(plan, engine, bus, stop)
    metrics = Metrics()
    metrics.read(lambda: server_readings(server))
    scraping = server.authorizer.of("service")
    app = make_app(
        *("rollmesh rollout server", version("rollmesh"), server.lifespan, server.not_ready, metrics),
        metrics_access=scraping,
    )
    app.add_middleware(BodyLimit, limit_bytes=plan.settings.rollout.max_body_mib << 20)
    trace_calls(app, plan.tracing)
    app.add_middleware(AuthMiddleware, authorizer=server.authorizer, sessions=True)

    @app.exception_handler(EngineCrashedError)
    async def on_crash(_: Request, error: EngineCrashedError) -> Response:
        """An engine that crashed serves nothing more: the process ends, and whoever watches it starts another."""
        server.fail(error)
        return error_answer(error)

    routers = [
        # First what is called most: a call looks at each route before its own.
        completion_routes(server),
        group_routes(server),
        session_routes(server),
        trajectory_routes(server),
        model_routes(server),
        engine_routes(server),
        weight_update_routes(server),
        admin_routes(server),
        weight_routes(ServedWeights(server), ERRORS, server.authorizer.of("service")),
    ]
    for router in routers:
        # `include_router` would make each route a second time, which takes as long as the first.
        app.router.routes.extend(router.routes)
    return app


# A rollout server's figures, read off it when somebody scrapes: a token costs nothing more for being counted.


def server_readings(server: RolloutServer) -> Iterator[Reading]:
    """The engine's and the sessions' figures; none before the engine is up. For the event loop."""
    try:
        parts = server.parts()
    except NotReadyError:
        return
    status = parts.engine.status()
    yield Reading(catalog.ROLLOUT_VERSION, status.policy_version)
    if status.staged_version is not None:
        yield Reading(catalog.ROLLOUT_STAGED, status.staged_version)
    yield Reading(catalog.ROLLOUT_SAMPLED, status.tokens_generated)
    yield Reading(catalog.ROLLOUT_PREFILLED, status.prefill_tokens)
    yield Reading(catalog.ROLLOUT_RUNNING, status.running)
    yield Reading(catalog.ROLLOUT_WAITING, status.waiting)
    yield Reading(catalog.ROLLOUT_PAUSED, status.paused)
    yield Reading(catalog.ROLLOUT_COMMITS, status.commits)
    if status.stalls_ms:
        yield Reading(catalog.ROLLOUT_STALL, status.stalls_ms[-1] / 1e3)
    yield Reading(catalog.ROLLOUT_GROUPS, len(parts.registry))
    yield Reading(catalog.ROLLOUT_SESSIONS, parts.registry.live_sessions)
    yield Reading(catalog.ROLLOUT_ADMISSION, parts.gate.waiting)
    yield Reading(catalog.ROLLOUT_HTTP, server.http_cpu_s())
