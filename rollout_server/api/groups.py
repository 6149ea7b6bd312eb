"""The group API: open, generate turns, finish; leases of runners, which play groups; the state of run and engine.

Bodies: `services.wire.rollout_api`.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from rollout_server.api.request_names import call_name, name_version
from rollout_server.api.routes import ERRORS, Ready, RolloutRoute, checked
from rollout_server.completions.resumable import Progress
from rollout_server.completions.turns import TurnTaker, delivered
from rollout_server.engines.base import Engine
from rollout_server.lifecycle.admission import AdmissionGate
from rollout_server.lifecycle.finish import Finisher
from rollout_server.lifecycle.open import SessionOpener
from rollout_server.lifecycle.runners import RunnerWatch
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.access import Access
from rollout_server.sessions.group import GroupRegistry
from services.http.struct_answer import struct_answer
from services.http.typed_route import answer
from services.http.while_connected import ClientGoneError, while_connected
from services.policies.training.deadlines import answered_within
from services.run_store.ledger import Ledger
from services.run_store.status import EvaluationStore
from services.wire import rollout_api
from services.wire.rollout_api import Runner, RunnerLease


def group_routes(
    access: Ready[Access],
    opener: Ready[SessionOpener],
    takeover: Ready[Takeover],
    groups: Ready[GroupRegistry],
    turns: Ready[TurnTaker],
    finisher: Ready[Finisher],
    engine: Engine,
    check_taking_calls: Callable[[], None],
    patience_s: float,
    check_body: Callable[[bytes], None],
) -> APIRouter:
    """Routes that environments call. `patience_s`: how long the engine may sample nothing before a turn fails.

    `check_body`: refuses bodies before they are parsed.
    """
    router = APIRouter(route_class=checked(check_body), tags=["rollout"], responses=ERRORS)

    @router.post("/groups", status_code=201, response_model=rollout_api.GroupOpened)
    async def open_group(call: rollout_api.OpenGroup, request: Request) -> Response:
        """Open a group. For `train`, waits up to `wait_s` for admission, then answers 429."""
        access().require_agent(request)
        check_taking_calls()
        group = await while_connected(request, opener().open_group(call, call_name(request)))
        most = 0 if group.sampling is None else group.sampling.max_tokens
        return struct_answer(
            rollout_api.GroupOpened(
                group_id=group.group_id,
                ordinal=group.ordinal,
                session_ids=list(group.sessions),
                api_keys=[access().keys.issue(name) for name in group.sessions],
                policy_version=engine.policy_version,
                turn_within_s=answered_within(rollout_api.TURN_LEAST_S, most),
            ),
            status_code=201,
        )

    @router.post("/groups/{group_id}/turns", response_model=rollout_api.TurnsTaken)
    async def take_turns(group_id: str, call: rollout_api.TakeTurns, request: Request) -> Response:
        """Generate one turn in one or more sessions of the group. The call takes effect whole or not at all."""
        access().require_agent(request)
        await takeover().hold_group(group_id)
        check_taking_calls()
        name_version(engine.policy_version)
        group = groups().find_open(group_id)
        try:
            taken = await while_connected(
                request,
                turns().take(group, call, call_name(request)),
                check=Progress(engine).check,
                check_every_s=patience_s,
            )
        except ClientGoneError:
            # What breaks off under a runner that lives is sent again; whether it lives, its lease says.
            group.client_gone = group.runner is None
            raise
        delivered(group, call)
        return Response(taken, media_type="application/json")

    @router.post("/groups/{group_id}/finish", response_model=rollout_api.GroupFinished)
    async def finish_group(group_id: str, call: rollout_api.FinishGroup, request: Request) -> Response:
        """Write the group's trajectories to the stream, exactly once however often this is called."""
        access().require_agent(request)
        name_version(engine.policy_version)
        await takeover().hold_group(group_id)
        stream_ids = await finisher().finish(group_id, call.rewards)
        return struct_answer(rollout_api.GroupFinished(stream_ids=stream_ids))

    return router


def report_routes(
    access: Ready[Access],
    groups: Ready[GroupRegistry],
    gate: Ready[AdmissionGate],
    ledger: Ready[Ledger],
    evaluations: Ready[EvaluationStore],
    engine: Engine,
    run_id: str,
    server_id: str,
    http_cpu_s: Callable[[], float],
) -> APIRouter:
    """Routes that tell how the run and this server's engine are doing."""
    router = APIRouter(route_class=RolloutRoute, tags=["rollout"], responses=ERRORS)

    @router.get("/run", response_model=rollout_api.RunState)
    async def read_run(request: Request) -> Response:
        """The run as this server sees it: its version, and whether the run has concluded."""
        access().require_agent(request, "reading")
        accounts = await ledger().accounts()
        return answer(
            rollout_api.RunState(
                run_id=run_id,
                policy_version=engine.policy_version,
                concluded=accounts.concluded,
                final_version=accounts.final_version,
            )
        )

    @router.post("/evaluations", status_code=204)
    async def tell_evaluation(call: rollout_api.EvaluationAnswers, request: Request) -> Response:
        """An evaluation of the run. A version that has one keeps it."""
        access().require_agent(request)
        await evaluations().keep(call)
        return Response(status_code=204)

    @router.get("/evaluations", response_model=rollout_api.Evaluations)
    async def read_run_evaluations(request: Request) -> Response:
        """The run's evaluations so far."""
        access().require_agent(request, "reading")
        return answer(rollout_api.Evaluations(evaluations=await evaluations().read()))

    @router.get("/engine", response_model=rollout_api.EngineReport)
    async def read_engine(request: Request) -> Response:
        """The engine at this moment."""
        access().require_agent(request, "reading")
        status = engine.status()
        return answer(
            rollout_api.EngineReport(
                server_id=server_id,
                name=status.name,
                policy_version=status.policy_version,
                running=status.running,
                waiting=status.waiting,
                paused=status.paused,
                tokens_generated=status.tokens_generated,
                prefill_tokens=status.prefill_tokens,
                commits=status.commits,
                stalls_ms=status.stalls_ms,
                open_groups=len(groups()),
                admission_waiting=gate().waiting,
                http_cpu_s=http_cpu_s(),
                kv_use=status.kv_use,
            )
        )

    return router


def runner_routes(access: Ready[Access], runners: Ready[RunnerWatch]) -> APIRouter:
    """Routes that runners call, at any server of the run."""
    router = APIRouter(prefix="/runners", route_class=RolloutRoute, tags=["rollout"], responses=ERRORS)

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
