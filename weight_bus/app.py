"""The weight bus as an HTTP service: engines register, the trainer announces, everybody flips together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version as package_version

from fastapi import FastAPI, Query, Request, Response

from services.app import Stop, make_app
from weight_bus.bus_api import EngineRegistered, EnginesView, RegisterEngine, UpdateView, VerifyView
from weight_bus.coordinator import Coordinator
from weight_bus.manifest import decode_manifest

LEASE_S = 5.0


def build_app(run_id: str, stage_timeout_s: float, *, lease_s: float = LEASE_S, stop: Stop | None = None) -> FastAPI:
    """The bus of one run. `stage_timeout_s` bounds every call to an engine.

    | route                                | body             | answer                                          |
    |--------------------------------------|------------------|-------------------------------------------------|
    | `POST /v1/engines`                   | RegisterEngine   | EngineRegistered; repeated, it is the heartbeat |
    | `DELETE /v1/engines/{id}`            |                  | 204                                             |
    | `GET /v1/engines`                    |                  | EnginesView                                     |
    | `POST /v1/updates?wait_s=`           | encoded Manifest | UpdateView; 202 new, 200 known, 409 conflict    |
    | `GET /v1/updates/{version}?wait_s=`  |                  | UpdateView, once settled or `wait_s` have passed |
    | `POST /v1/verify`                    |                  | VerifyView                                      |
    """
    coordinator = Coordinator(run_id, timeout_s=stage_timeout_s, lease_s=lease_s)
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

    app = make_app("weight-bus", package_version("rollmesh"), lifespan, not_ready=list)

    @app.post("/v1/engines")
    async def register(engine: RegisterEngine) -> EngineRegistered:
        return coordinator.register(engine)

    @app.delete("/v1/engines/{engine_id}", status_code=204)
    async def deregister(engine_id: str) -> None:
        coordinator.deregister(engine_id)

    @app.get("/v1/engines")
    async def engines() -> EnginesView:
        return coordinator.engines()

    @app.post("/v1/updates")
    async def announce(
        request: Request, response: Response, wait_s: float = Query(default=0.0, ge=0.0, le=60.0)
    ) -> UpdateView:
        payload = await request.body()
        manifest = decode_manifest(payload)
        response.status_code = 202 if coordinator.announce(manifest, payload) else 200
        if wait_s:
            await coordinator.wait_settled(manifest.version, wait_s)
        return coordinator.view(manifest.version)

    @app.get("/v1/updates/{version}")
    async def update(version: int, wait_s: float = Query(default=0.0, ge=0.0, le=60.0)) -> UpdateView:
        if wait_s:
            await coordinator.wait_settled(version, wait_s)
        return coordinator.view(version)

    @app.post("/v1/verify")
    async def verify() -> VerifyView:
        return await coordinator.verify()

    return app
