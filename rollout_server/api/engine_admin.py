"""Admin routes of a rollout server: vLLM's pause, resume, abort and world size; drain."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request

from rollout_server.api.typed_route import ERRORS
from rollout_server.server import RolloutServer
from services.wire.gateway_api import Draining
from services.wire.vllm_api import AbortAnswer, AbortRequests, IsPaused, PauseAnswer, WorldSize
from services.wire.weights_api import PauseMode


def engine_routes(server: RolloutServer) -> APIRouter:
    """Routes for operating the engine; names and answers are vLLM's."""
    router = APIRouter(tags=["engine"], responses=ERRORS, dependencies=server.authorizer.of("service"))

    @router.post("/pause")
    async def pause(
        mode: PauseMode = "abort",
        clear_cache: Annotated[bool, Query(description="Ignored: no prefix outlives its request.")] = True,
    ) -> PauseAnswer:
        """Stop decoding: `abort` ends requests with what they have, `wait` lets them end, `keep` freezes them."""
        del clear_cache
        await server.parts().engine.pause(mode)
        return PauseAnswer(status="paused")

    @router.post("/resume")
    async def resume() -> PauseAnswer:
        await server.parts().engine.resume()
        return PauseAnswer(status="resumed")

    @router.get("/is_paused")
    async def is_paused() -> IsPaused:
        return IsPaused(is_paused=server.parts().engine.status().paused)

    @router.post("/abort_requests")
    async def abort_requests(call: Annotated[AbortRequests | None, Body()] = None) -> AbortAnswer:
        """End requests with what was sampled so far, finish reason `abort`. No body or no ids: all of them.

        `aborted`: how many were in flight.
        """
        request_ids = call.request_ids if call is not None else None
        return AbortAnswer(aborted=await server.parts().engine.abort(request_ids or None))

    @router.get("/get_world_size")
    async def get_world_size(
        include_dp: Annotated[bool, Query(description="Makes no difference: a server holds the model once.")] = True,
    ) -> WorldSize:
        """How many ranks a trainer's transport would have to reach."""
        del include_dp
        return WorldSize(world_size=server.parts().engine.status().ranks)

    return router


def admin_routes(server: RolloutServer) -> APIRouter:
    """Routes for operators and the gateway."""
    router = APIRouter(prefix="/admin", tags=["admin"], responses=ERRORS)

    @router.post("/drain", status_code=202)
    async def drain(request: Request) -> Draining:
        """Hand everything over to other servers and take nothing new. The process stays; SIGTERM ends it."""
        server.parts().access.require_agent(request, "operator")
        await server.drain()
        return Draining(server_id=server.plan.server_id, state="draining")

    return router
