"""The rollout server's HTTP application."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, Request, Response

from rollout_server.admin_routes import admin_routes
from rollout_server.dialect.routes import dialect_routes
from rollout_server.engine_routes import engine_routes
from rollout_server.engines.base import Engine
from rollout_server.engines.errors import EngineCrashedError
from rollout_server.group_routes import group_routes
from rollout_server.model_routes import model_routes
from rollout_server.route_errors import ERRORS
from rollout_server.served_weights import ServedWeights
from rollout_server.server import RolloutServer, ServerPlan
from rollout_server.server_metrics import server_readings
from rollout_server.session_routes import session_routes
from rollout_server.trajectory_routes import trajectory_routes
from rollout_server.weight_update_routes import weight_update_routes
from services.app import Stop, error_answer, make_app
from services.body_limit import BodyLimit
from services.metrics import Metrics
from services.threshold import Threshold
from services.traced_calls import trace_calls
from weight_bus.membership import Bus
from weight_bus.weight_routes import weight_routes


def make_rollout_app(plan: ServerPlan, engine: Engine, bus: Bus | None, stop: Stop) -> FastAPI:
    """The application around an engine that has not been started; without a bus it serves the weights it has."""
    server = RolloutServer(plan, engine, bus, stop)
    metrics = Metrics()
    metrics.read(lambda: server_readings(server))
    scraping = server.doors.of("service")
    app = make_app(
        *("rollmesh rollout server", version("rollmesh"), server.lifespan, server.not_ready, metrics),
        metrics_access=scraping,
    )
    app.add_middleware(BodyLimit, limit_bytes=plan.settings.rollout.max_body_mib << 20)
    trace_calls(app, plan.tracing)
    app.add_middleware(Threshold, doors=server.doors, sessions=True)

    @app.exception_handler(EngineCrashedError)
    async def on_crash(_: Request, error: EngineCrashedError) -> Response:
        """An engine that crashed serves nothing more: the process ends, and whoever watches it starts another."""
        server.fail(error)
        return error_answer(error)

    routers = [
        # First what is called most: a call looks at each route before its own.
        dialect_routes(server),
        group_routes(server),
        session_routes(server),
        trajectory_routes(server),
        model_routes(server),
        engine_routes(server),
        weight_update_routes(server),
        admin_routes(server),
        weight_routes(ServedWeights(server), ERRORS, server.doors.of("service")),
    ]
    for router in routers:
        # `include_router` would make each route a second time, which takes as long as the first.
        app.router.routes.extend(router.routes)
    return app
