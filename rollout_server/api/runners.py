"""The leases of environment runners (bodies in `services.wire.rollout_api`): join a run, be heard of, leave."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rollout_server.api.typed_route import ERRORS, Ready, TypedRoute, answer
from rollout_server.lifecycle.runners import RunnerWatch
from rollout_server.sessions.access import Access
from services.wire.rollout_api import Runner, RunnerLease


def runner_routes(access: Ready[Access], runners: Ready[RunnerWatch]) -> APIRouter:
    """Routes that runners call, at any server of the run."""
    router = APIRouter(prefix="/runners", route_class=TypedRoute, tags=["rollout"], responses=ERRORS)

    @router.post("", response_model=RunnerLease)
    async def join(call: Runner, request: Request) -> Response:
        """Take a name. The groups of an earlier process of that name are given up."""
        access().require_agent(request)
        return answer(await runners().join(call))

    @router.post("/heartbeat", response_model=RunnerLease)
    async def heartbeat(call: Runner, request: Request) -> Response:
        """Keep the runner's groups for another lease; 409 where another process has its name."""
        access().require_agent(request)
        return answer(await runners().renew(call))

    @router.post("/leave", status_code=204)
    async def leave(call: Runner, request: Request) -> Response:
        """The runner ends: its groups are given up at once."""
        access().require_agent(request)
        await runners().leave(call)
        return Response(status_code=204)

    return router
