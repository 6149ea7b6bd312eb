"""The rollout API: groups are opened, take turns and are finished (bodies in `services.wire.rollout_api`)."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rollout_server.api.request_names import call_name, name_version
from rollout_server.api.streaming import ClientGoneError, while_connected
from rollout_server.api.typed_route import ERRORS, TypedRoute, answer
from rollout_server.completions.resumable import Progress
from rollout_server.server import RolloutServer
from services.wire.rollout_api import (
    EngineReport,
    FinishGroup,
    GroupFinished,
    GroupOpened,
    OpenGroup,
    RunState,
    TakeTurns,
    TurnsTaken,
)


def group_routes(server: RolloutServer) -> APIRouter:
    """Routes that environments call."""
    patience_s = server.plan.settings.rollout.group_timeout_s
    router = APIRouter(
        route_class=TypedRoute,
        tags=["rollout"],
        responses=ERRORS,
    )

    @router.post("/groups", status_code=201, response_model=GroupOpened)
    async def open_group(call: OpenGroup, request: Request) -> Response:
        """Open a group. For `train`, waits up to `wait_s` for admission, then answers 429."""
        parts = server.parts()
        parts.access.require_agent(request)
        server.check_taking_calls()
        group = await while_connected(request, parts.opener.open_group(call, call_name(request)))
        return answer(
            GroupOpened(
                group_id=group.group_id,
                ordinal=group.ordinal,
                session_ids=list(group.sessions),
                api_keys=[parts.access.keys.issue(name) for name in group.sessions],
                policy_version=parts.engine.policy_version,
            ),
            status_code=201,
        )

    @router.post("/groups/{group_id}/turns", response_model=TurnsTaken)
    async def take_turns(group_id: str, call: TakeTurns, request: Request) -> Response:
        """Let the policy speak in one or more sessions of the group. The call takes effect whole or not at all."""
        parts = server.parts()
        parts.access.require_agent(request)
        await parts.takeover.hold_group(group_id)
        server.check_taking_calls()
        name_version(parts.engine.policy_version)
        group = parts.registry.find_open(group_id)
        try:
            taken = await while_connected(
                request,
                parts.turns.take(group, call, call_name(request)),
                check=Progress(parts.engine).check,
                check_every_s=patience_s,
            )
        except ClientGoneError:
            group.left = True
            raise
        return Response(taken, media_type="application/json")

    @router.post("/groups/{group_id}/finish", response_model=GroupFinished)
    async def finish_group(group_id: str, call: FinishGroup, request: Request) -> Response:
        """Write the group's trajectories to the stream, exactly once however often this is called."""
        parts = server.parts()
        parts.access.require_agent(request)
        name_version(parts.engine.policy_version)
        await parts.takeover.hold_group(group_id)
        stream_ids = await parts.finisher.finish(group_id, call.rewards)
        return answer(GroupFinished(stream_ids=stream_ids))

    @router.get("/run", response_model=RunState)
    async def read_run(request: Request) -> Response:
        """The run as this server sees it: its version, and whether the run has concluded."""
        parts = server.parts()
        parts.access.require_agent(request, "reading")
        accounts = await parts.ledger.accounts()
        return answer(
            RunState(
                run_id=server.plan.run_id,
                policy_version=parts.engine.policy_version,
                concluded=accounts.concluded,
                final_version=accounts.final_version,
            )
        )

    @router.get("/engine", response_model=EngineReport)
    async def read_engine(request: Request) -> Response:
        """The engine at this moment."""
        parts = server.parts()
        parts.access.require_agent(request, "reading")
        status = parts.engine.status()
        return answer(
            EngineReport(
                server_id=server.plan.server_id,
                name=status.name,
                policy_version=status.policy_version,
                running=status.running,
                waiting=status.waiting,
                paused=status.paused,
                tokens_generated=status.tokens_generated,
                prefill_tokens=status.prefill_tokens,
                commits=status.commits,
                stalls_ms=status.stalls_ms,
                open_groups=len(parts.registry),
                admission_waiting=parts.gate.waiting,
                http_cpu_s=server.http_cpu_s(),
            )
        )

    return router
