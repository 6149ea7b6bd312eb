"""The weight bus as a FastAPI service: engines register, the trainer announces versions, all engines commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version as package_version
from pathlib import Path

from fastapi import FastAPI

from services.http.app import BodyLimit, Stop, make_app
from services.http.auth import AuthMiddleware, Authorizer
from services.observability.metrics import Metrics
from services.observability.middleware import trace_calls
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.fleet.policy import BARRIER, FleetPolicy
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PUBLIC, Trust
from weight_bus.coordinator.coordinator import Coordinator
from weight_bus.coordinator.engine_client import EngineClient
from weight_bus.coordinator.operations import FleetCalls, Snapshots
from weight_bus.coordinator.routes import admin_routes
from weight_bus.coordinator.version_floor import VersionFloor

LEASE_S = 5.0
MANIFEST_LIMIT = 256 << 20
"""A manifest of a hundred thousand shards has some ten MiB."""


def build_app(
    run_id: str,
    stage_timeout_s: float,
    *,
    lease_s: float = LEASE_S,
    policy: FleetPolicy = BARRIER,
    keys: Keys = NO_KEYS,
    engine_key: str | None = None,
    stop: Stop | None = None,
    trust: Trust = PUBLIC,
    tracing: Tracing = NO_TRACING,
    state_file: Path | None = None,
) -> FastAPI:
    """The bus of one run. `stage_timeout_s` bounds every call to an engine, those that move or hash all
    weights at the least (`services.policies.training.deadlines`).

    `keys`: asked for by the routes; with a weights key, manifests must bear its signature. `engine_key`: is shown to
    engines, else the peer key; `trust`: whose certificates they may show. `state_file`: where the newest version's number
    is kept for the next start. `GET /docs` and `/openapi.json` describe the routes. Raises UsageError for a `state_file`
    that is another run's.
    """
    client = EngineClient(stage_timeout_s, engine_key or keys.peer, trust, tracing)
    metrics = Metrics()
    coordinator = Coordinator(
        run_id,
        client,
        lease_s=lease_s,
        policy=policy,
        weights_key=keys.weights,
        metrics=metrics,
        tracing=tracing,
        floor=VersionFloor(run_id, state_file),
    )
    if stop is not None:
        stop.on_stop = coordinator.release_waiters

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        leases = asyncio.create_task(coordinator.watch_leases(), name="leases")
        try:
            yield
        finally:
            leases.cancel()
            with suppress(asyncio.CancelledError):
                await leases
            await coordinator.close()

    authorizer = Authorizer(keys)
    scraping = authorizer.of("metrics")
    app = make_app("weight-bus", package_version("rollmesh"), lifespan, list, metrics, metrics_access=scraping)
    app.add_middleware(BodyLimit, limit_bytes=MANIFEST_LIMIT)
    trace_calls(app, tracing)
    app.add_middleware(AuthMiddleware, authorizer=authorizer)
    calls, snapshots = FleetCalls(coordinator, client), Snapshots(coordinator, run_id, keys.weights)
    app.include_router(admin_routes(authorizer, coordinator, calls, snapshots))
    return app
