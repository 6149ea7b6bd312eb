"""The start of vLLM's surface: pause, resume and abort, with its names and answers."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import Field

from rollout_server.engines.base import PauseMode
from rollout_server.server import RolloutServer
from services.wire.rollout_api import Body


class PauseAnswer(Body):
    status: Literal["paused", "resumed"]


class IsPaused(Body):
    is_paused: bool


class AbortRequests(Body):
    """No ids: every request in flight."""

    request_ids: list[str] = Field(default_factory=list)


class AbortAnswer(Body):
    status: Literal["aborted"] = "aborted"
    aborted: int


def engine_routes(server: RolloutServer) -> APIRouter:
    """Routes that whoever operates the engine calls."""
    router = APIRouter(tags=["engine"])

    @router.post("/pause")
    async def pause(mode: PauseMode = "abort") -> PauseAnswer:
        """Stop decoding: `abort` ends requests with what they have, `wait` lets them end, `keep` freezes them."""
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
    async def abort_requests(call: AbortRequests) -> AbortAnswer:
        """End requests with what was drawn so far; their turns answer with finish reason `abort`."""
        return AbortAnswer(aborted=await server.parts().engine.abort(call.request_ids or None))

    return router
