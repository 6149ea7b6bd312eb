"""Admin routes of a rollout server: vLLM's pause, resume, abort and world size; drain."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request

from rollout_server.api.routes import ERRORS, Ready
from rollout_server.engines.base import Engine
from rollout_server.sessions.access import Access
from services.wire.gateway_api import Draining
from services.wire.vllm_api import AbortAnswer, AbortRequests, IsPaused, PauseAnswer, WorldSize
from services.wire.weights_api import PauseMode


def engine_routes(engine: Ready[Engine], dependencies: list[Any]) -> APIRouter:
    """Routes for operating the engine; names and answers are vLLM's. `dependencies` judge the caller."""
    router = APIRouter(tags=["engine"], responses=ERRORS, dependencies=dependencies)

    @router.post("/pause")
    async def pause(
        mode: PauseMode = "abort",
        clear_cache: Annotated[bool, Query(description="Ignored: no prefix outlives its request.")] = True,
    ) -> PauseAnswer:
        """Stop decoding: `abort` ends requests with what they have, `wait` lets them end, `keep` freezes them."""
        del clear_cache
        await engine().pause(mode)
        return PauseAnswer(status="paused")

    @router.post("/resume")
    async def resume() -> PauseAnswer:
        await engine().resume()
        return PauseAnswer(status="resumed")

    @router.get("/is_paused")
    async def is_paused() -> IsPaused:
        return IsPaused(is_paused=engine().status().paused)

    @router.post("/abort_requests")
    async def abort_requests(call: Annotated[AbortRequests | None, Body()] = None) -> AbortAnswer:
        """End requests with what was sampled so far, finish reason `abort`. No body or no ids: all of them.

        `aborted`: how many were in flight.
        """
        request_ids = call.request_ids if call is not None else None
        return AbortAnswer(aborted=await engine().abort(request_ids or None))

    @router.get("/get_world_size")
    async def get_world_size(
        include_dp: Annotated[bool, Query(description="Makes no difference: a server holds the model once.")] = True,
    ) -> WorldSize:
        """How many ranks a trainer's transport would have to reach."""
        del include_dp
        return WorldSize(world_size=engine().status().ranks)

    return router


def admin_routes(access: Ready[Access], drain_server: Callable[[], Awaitable[None]], server_id: str) -> APIRouter:
    """Routes for operators and the gateway: draining one rollout server."""
    router = APIRouter(prefix="/admin", tags=["admin"], responses=ERRORS)

    @router.post("/drain", status_code=202)
    async def drain(request: Request) -> Draining:
        """Hand everything over to other servers and take nothing new. The process stays; SIGTERM ends it."""
        access().require_agent(request, "operator")
        await drain_server()
        return Draining(server_id=server_id, state="draining")

    return router
