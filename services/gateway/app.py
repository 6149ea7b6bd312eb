"""The gateway's HTTP application: its own few routes, and in front of them the proxied paths."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from services.app import Stop, make_app
from services.body_limit import BodyLimit
from services.gateway.admin_routes import admin_routes
from services.gateway.gateway import Gateway, GatewayPlan
from services.gateway.gateway_metrics import gateway_readings
from services.gateway.proxy import ProxyPaths
from services.gateway.run_routes import run_routes
from services.metrics import Metrics
from services.threshold import Threshold
from services.traced_calls import trace_calls


def make_gateway_app(plan: GatewayPlan, stop: Stop, *, max_body_mib: int) -> FastAPI:
    """The application; bodies may be as large as the servers take them."""
    gateway = Gateway(plan, stop)
    metrics = Metrics()
    metrics.read(lambda: gateway_readings(gateway))
    scraping = gateway.doors.of("service")
    app = make_app(
        *("rollmesh gateway", version("rollmesh"), gateway.lifespan, gateway.not_ready, metrics),
        metrics_access=scraping,
    )
    app.include_router(run_routes(gateway))
    # Last: it answers every path that nobody else does.
    app.include_router(admin_routes(gateway))
    app.add_middleware(ProxyPaths, proxy=BodyLimit(gateway, max_body_mib << 20))
    trace_calls(app, plan.tracing)
    app.add_middleware(Threshold, doors=gateway.doors, sessions=True)
    return app
