"""HTTP routes of the weight bus under `/v1`: engine leases, weight updates, operator actions."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.responses import StreamingResponse

from services.http.app import declared_errors
from services.http.auth import Authorizer
from services.security.addresses import AddressRefusedError, check_resolved, check_url
from services.wire import weights_api
from weight_bus.coordinator.coordinator import Coordinator
from weight_bus.coordinator.events import encode_event
from weight_bus.coordinator.operations import FleetCalls, Snapshots
from weight_bus.manifest.manifest import decode_manifest

KEEP_ALIVE_S = 5.0
_MANIFEST_BODY = {
    "requestBody": {
        "required": True,
        "description": "An encoded `weight_bus.manifest.manifest.Manifest`, signed with the run's weight key",
        "content": {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_MEANINGS = {
    400: "Bytes that are no manifest",
    401: "No key, or a wrong one",
    403: "A key that does not open this, or a manifest without the right signature",
    404: "No such update",
    409: "It contradicts what happened before: another run, other bytes, an older version, too late",
    413: "A body that is too large",
    422: "A body or parameter that does not fit, or an address that is not called",
}
_ERRORS = declared_errors(_MEANINGS)
_ANNOUNCED: dict[int | str, dict[str, Any]] = {
    202: {"model": weights_api.UpdateView, "description": "A new version; engines are told to stage it"}
}
Wait = Annotated[
    float, Query(ge=0.0, le=60.0, description="Seconds to hold the answer until nothing but an operator is waited for")
]
Hold = Annotated[bool, Query(description="Stage only; `POST /v1/updates/{version}/commit` flips")]


def admin_routes(
    authorizer: Authorizer, coordinator: Coordinator, calls: FleetCalls, snapshots: Snapshots
) -> APIRouter:
    """Routes of trainers and engines have scope `service`, those of people `operator`."""
    services = APIRouter(prefix="/v1", responses=_ERRORS, dependencies=authorizer.of("service"))
    _engine_routes(services, coordinator)
    _update_routes(services, coordinator)
    _reading_routes(services, coordinator, calls)
    operators = APIRouter(prefix="/v1", responses=_ERRORS, dependencies=authorizer.of("operator"))
    _steering_routes(operators, coordinator, snapshots)
    _operator_routes(operators, coordinator, calls)
    both = APIRouter()
    both.include_router(services)
    both.include_router(operators)
    return both


def _engine_routes(router: APIRouter, coordinator: Coordinator) -> None:
    @router.post("/engines", tags=["engines"])
    async def register(engine: weights_api.RegisterEngine) -> weights_api.EngineRegistered:
        """Join, or keep the lease: the same call, repeated well within `lease_s`, is the heartbeat."""
        if coordinator.urls.get(engine.engine_id) != engine.url.rstrip("/"):
            await check_engine_url(engine.url)
        return coordinator.register(engine)

    @router.delete("/engines/{engine_id}", status_code=204, tags=["engines"])
    async def deregister(engine_id: str) -> None:
        """Leave: updates stop waiting for the engine. One that is not known is no error."""
        coordinator.deregister(engine_id)

    @router.get("/engines", tags=["engines"])
    async def engines() -> weights_api.EnginesView:
        """The live engines, and what each serves."""
        return coordinator.engines()


def _update_routes(router: APIRouter, coordinator: Coordinator) -> None:
    @router.post(
        "/updates",
        openapi_extra=_MANIFEST_BODY,
        tags=["updates"],
        responses=_ANNOUNCED,
    )
    async def announce(
        request: Request, response: Response, wait_s: Wait = 0.0, hold: Hold = False
    ) -> weights_api.UpdateView:
        """Announce a published version: 202 for a new one, 200 for one that is known by the same bytes."""
        payload = await request.body()
        manifest = decode_manifest(payload)
        new = coordinator.announce(manifest, payload, hold=hold)
        if new:
            await coordinator.floor.keep(manifest.version, manifest.root_digest)
        response.status_code = 202 if new else 200
        return await coordinator.wait_resting(manifest.version, wait_s)

    @router.get("/updates/{version}", tags=["updates"])
    async def update(version: int, wait_s: Wait = 0.0) -> weights_api.UpdateView:
        """How far an update is, engine by engine: pending, staging, prepared, committed or failed, and why."""
        return await coordinator.wait_resting(version, wait_s)

    @router.get("/versions", tags=["updates"])
    async def versions() -> weights_api.VersionsView:
        """The versions that the bus remembers, newest first, and who serves each."""
        return coordinator.versions()


def _reading_routes(router: APIRouter, coordinator: Coordinator, calls: FleetCalls) -> None:
    @router.post("/verify", tags=["operators"])
    async def verify(order: weights_api.VerifyOrder | None = None) -> weights_api.VerifyView:
        """Have every engine hash what it really serves, and generate a few tokens greedily; all must agree."""
        return await calls.verify(order or weights_api.VerifyOrder())

    @router.get("/events", tags=["operators"], response_class=StreamingResponse)
    async def events(last_event_id: Annotated[str | None, Header()] = None) -> StreamingResponse:
        """Server-sent events, from the oldest remembered or from `Last-Event-ID` on (data: WeightEvent)."""
        following = coordinator.events.follow(last_event_id, KEEP_ALIVE_S)
        return StreamingResponse(
            (encode_event(event) async for event in following),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )


def _steering_routes(router: APIRouter, coordinator: Coordinator, snapshots: Snapshots) -> None:
    @router.post(
        "/snapshots",
        tags=["updates"],
        responses=_ANNOUNCED,
    )
    async def push(order: weights_api.PushSnapshot, response: Response, wait_s: Wait = 0.0) -> weights_api.UpdateView:
        """Announce a folder of safetensors as a version; the answers are those of `POST /v1/updates`."""
        version, new = await snapshots.push(order)
        response.status_code = 202 if new else 200
        return await coordinator.wait_resting(version, wait_s)

    @router.post("/updates/{version}/commit", tags=["updates"])
    async def commit(version: int, wait_s: Wait = 0.0) -> weights_api.UpdateView:
        """Flip a held version, let a stopped roll go on, or offer a withdrawn version again."""
        coordinator.release(version)
        return await coordinator.wait_resting(version, wait_s)

    @router.post("/updates/{version}/cancel", tags=["updates"])
    async def cancel(version: int) -> weights_api.UpdateView:
        """Withdraw a version before its flips are decided."""
        return coordinator.cancel(version)


def _operator_routes(router: APIRouter, coordinator: Coordinator, calls: FleetCalls) -> None:
    @router.post("/rollback", tags=["operators"])
    async def rollback(order: weights_api.RollbackOrder | None = None, wait_s: Wait = 0.0) -> weights_api.RollbackView:
        """Bring every engine back to the version before, between two decode steps. One step is kept."""
        begun = coordinator.rollback(None if order is None else order.version)
        update = await coordinator.wait_resting(begun.update.version, wait_s)
        return weights_api.RollbackView(withdrawn=begun.withdrawn, update=update)

    @router.post("/pause", tags=["operators"])
    async def pause(order: weights_api.PauseOrder | None = None) -> weights_api.FleetAnswer:
        """Stop decoding at every engine. Weight updates need no pause: this is for a stop of the world."""
        return await calls.pause((order or weights_api.PauseOrder()).mode)

    @router.post("/resume", tags=["operators"])
    async def resume() -> weights_api.FleetAnswer:
        """Let every engine decode again."""
        return await calls.resume()


_RESOLVED_WITHIN_S = 2.0


async def check_engine_url(url: str) -> None:
    """Raises AddressRefusedError for an address that no engine has, and for a name that cannot be looked up now."""
    host, port = check_url(url)
    try:
        async with asyncio.timeout(_RESOLVED_WITHIN_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        what = f"{host}, where an engine says it is, cannot be looked up ({error!r})"
        raise AddressRefusedError(what, "correct its --own-url, or the name service") from error
    check_resolved(url, [str(address[0]) for *_, address in found])
