"""What operators ask of one rollout server."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rollout_server.route_errors import ERRORS
from rollout_server.server import RolloutServer
from services.wire.admin_api import Draining


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
