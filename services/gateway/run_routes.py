"""`GET /run` of a mesh: what is true of all its servers, not of the one that a call happens to meet."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from services.gateway.gateway import Gateway
from services.gateway.servers import Server
from services.wire.errors import NotReadyError, RollmeshError
from services.wire.rollout_api import RunState


def run_routes(gateway: Gateway) -> APIRouter:
    """The one route of agents that is answered by the gateway itself."""
    router = APIRouter(tags=["rollout"], dependencies=gateway.doors.of("reading"))

    @router.get("/run")
    async def read_run(request: Request) -> RunState:
        """The run as the server with the oldest policy sees it: whoever waits for new weights waits for all servers."""
        parts = gateway.parts()

        async def ask(server: Server) -> RunState | None:
            try:
                content = await parts.upstream.ask(server, "GET", "/run", request.headers.get("authorization"))
            except RollmeshError:
                return None  # it is on its way out, or in: the others serve
            return RunState.model_validate_json(content)

        states = [state for state in await asyncio.gather(*map(ask, parts.servers.serving())) if state is not None]
        if not states:
            raise NotReadyError("no rollout server says how far the run is", "try again; see GET /admin/servers")
        return min(states, key=lambda state: state.policy_version)

    return router
