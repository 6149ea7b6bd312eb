"""What an admin key may do from the page: drain a server, hold decoding, roll weights back, verify them.

    page ──confirmed──► POST /api/runs/{run}/actions/… ──the caller's own key──► the very route that the CLI calls

| action   | whom it asks                                         |
|----------|------------------------------------------------------|
| drain    | `POST /admin/drain` of the rollout server            |
| hold     | `POST /v1/pause` of the weight bus, which keeps what is in flight |
| resume   | `POST /v1/resume` of the weight bus                  |
| rollback | `POST /v1/rollback` of the weight bus                |
| verify   | `POST /v1/verify` of the weight bus                  |
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

import httpx
import structlog
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.exceptions import RedisError

from services.dashboard.open_runs import OpenRun
from services.dashboard.plan import DashboardPlan
from services.http.auth import Authorizer
from services.run_store.client import connect, reached_by
from services.run_store.discovery import ServiceKind, ServiceRegistry
from services.wire.error_answer import typed_error
from services.wire.errors import ConflictError, DeadlineError, NotFoundError, RollmeshError
from services.wire.gateway_api import Draining
from services.wire.weights_api import FleetAnswer, PauseOrder, RollbackOrder, RollbackView, VerifyOrder, VerifyView

_REGISTRY_WITHIN_S = 3.0
_CALL_WITHIN_S = 30.0
_log = structlog.get_logger()
_Answer = TypeVar("_Answer", bound=BaseModel)


class Confirmed(BaseModel):
    """Body of every action: it was confirmed by whoever asked for it."""

    model_config = ConfigDict(extra="forbid")
    confirmed: Literal[True]


class ConfirmedDrain(Confirmed):
    server_id: str = Field(min_length=1, max_length=256)


class _Nothing(BaseModel):
    """A body without fields."""


def action_routes(plan: DashboardPlan, authorizer: Authorizer) -> APIRouter:
    """The routes; all of them need the admin key."""
    router = APIRouter(prefix="/api/runs/{run}/actions", tags=["actions"], dependencies=authorizer.of("operator"))

    async def ask(
        request: Request,
        run: str,
        kind: ServiceKind,
        name: str | None,
        path: str,
        body: BaseModel,
        kind_of: type[_Answer],
    ) -> _Answer:
        found = await asyncio.to_thread(plan.runs.named, run)
        url = await _url(plan, found, kind, name)
        shown = request.headers.get("authorization")
        _log.info("admin action", run=found.run_id, path=path, service=name or kind)
        return await _post(plan, f"{url}{path}", shown, body, kind_of)

    @router.post("/drain")
    async def drain(run: str, order: ConfirmedDrain, request: Request) -> Draining:
        """A server releases its sessions, which others take over, and ends."""
        return await ask(request, run, "rollout-server", order.server_id, "/admin/drain", _Nothing(), Draining)

    @router.post("/hold")
    async def hold(run: str, order: Confirmed, request: Request) -> FleetAnswer:
        """Every engine stops decoding, and keeps what is in flight, until `resume`."""
        del order
        return await ask(request, run, "weight-bus", None, "/v1/pause", PauseOrder(mode="keep"), FleetAnswer)

    @router.post("/resume")
    async def resume(run: str, order: Confirmed, request: Request) -> FleetAnswer:
        """Every engine decodes again."""
        del order
        return await ask(request, run, "weight-bus", None, "/v1/resume", _Nothing(), FleetAnswer)

    @router.post("/rollback")
    async def rollback(run: str, order: Confirmed, request: Request) -> RollbackView:
        """Every engine goes back to the version before, between two decode steps."""
        del order
        return await ask(request, run, "weight-bus", None, "/v1/rollback", RollbackOrder(), RollbackView)

    @router.post("/verify")
    async def verify(run: str, order: Confirmed, request: Request) -> VerifyView:
        """Every engine hashes what it really serves, and generates a few tokens greedily; all must agree."""
        del order
        return await ask(request, run, "weight-bus", None, "/v1/verify", VerifyOrder(canary=True), VerifyView)

    return router


async def _url(plan: DashboardPlan, run: OpenRun, kind: ServiceKind, name: str | None) -> str:
    """Where a service of a run is. Raises ConflictError for a run that has ended, NotFoundError, DeadlineError."""
    if run.redis_url is None:
        raise ConflictError(f"the run {run.name} has ended", "only a run that runs can be acted on")
    redis = connect(reached_by(run.redis_url, plan.keys.redis, plan.trust))
    try:
        async with asyncio.timeout(_REGISTRY_WITHIN_S):
            listed = await ServiceRegistry(redis, run.run_id).services()
    except (RedisError, OSError, TimeoutError) as error:
        raise DeadlineError(f"Redis does not say where the {kind} is ({error!r})", "see whether it runs") from error
    finally:
        await redis.aclose()
    found = [each.record for each in listed if each.record.kind == kind and name in (None, each.record.name)]
    if not found:
        known = ", ".join(sorted(each.record.name for each in listed)) or "none"
        raise NotFoundError(f"the run has no {kind} {name or ''}".strip(), f"known services: {known}")
    return found[0].url


async def _post(plan: DashboardPlan, url: str, shown: str | None, body: BaseModel, kind: type[_Answer]) -> _Answer:
    """Raises the typed error that the service answered, or DeadlineError."""
    headers = {"content-type": "application/json"} | ({} if shown is None else {"authorization": shown})
    try:
        async with httpx.AsyncClient(trust_env=False, verify=plan.trust.verify, timeout=_CALL_WITHIN_S) as http:
            answer = await http.post(url, content=body.model_dump_json(), headers=headers)
    except httpx.HTTPError as error:
        raise DeadlineError(f"{url} does not answer ({error!r})", "see whether the service runs") from error
    if answer.status_code >= httpx.codes.BAD_REQUEST:
        raise typed_error(url, answer.status_code, answer.headers.get("retry-after"), answer.content)
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise RollmeshError(f"{url} answered {answer.content[:200]!r}", "see that it is a service of ours") from error
