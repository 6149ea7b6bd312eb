"""The rollout server's HTTP application."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from rollout_server.engine_routes import engine_routes
from rollout_server.engines.base import Engine
from rollout_server.group_routes import group_routes
from rollout_server.membership import Bus
from rollout_server.server import RolloutServer, ServerPlan
from rollout_server.weight_routes import weight_routes
from services.app import Stop, make_app


def make_rollout_app(plan: ServerPlan, engine: Engine, bus: Bus | None, stop: Stop) -> FastAPI:
    """The application around an engine that has not been started; without a bus it serves the weights it has."""
    server = RolloutServer(plan, engine, bus, stop)
    app = make_app("rollmesh rollout server", version("rollmesh"), server.lifespan, server.not_ready)
    for routes in (group_routes, engine_routes, weight_routes):
        app.include_router(routes(server))
    return app
