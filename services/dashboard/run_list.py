"""`GET /api/runs`: which runs are open here."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from services.dashboard.plan import DashboardPlan
from services.http.auth import Authorizer


class RunLine(BaseModel):
    """`live`: it runs now."""

    name: str
    run_id: str
    live: bool


class RunLines(BaseModel):
    """The run that is shown first comes first."""

    runs: list[RunLine]


def run_routes(plan: DashboardPlan, authorizer: Authorizer) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["runs"])

    @router.get("/api/runs", dependencies=authorizer.of("reading"))
    def read_runs() -> RunLines:
        """The runs that are open here."""
        return RunLines(
            runs=[RunLine(name=run.name, run_id=run.run_id, live=run.redis_url is not None) for run in plan.runs.all()]
        )

    return router
