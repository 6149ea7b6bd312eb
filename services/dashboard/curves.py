"""`GET /api/runs/{run}/steps`: curves of one run. Small whatever its length: steps are joined to places."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from services.dashboard.plan import DashboardPlan
from services.dashboard.steps import NAMES, Columns, StepFiles, Steps
from services.http.auth import Authorizer
from services.wire.errors import NotFoundError

MOST_PLACES = 1000
_Figure = Annotated[list[str], Query(min_length=1, max_length=len(NAMES), description="Names of metrics.jsonl")]


class StepColumns(BaseModel):
    """`services.dashboard.steps.Columns`."""

    names: list[str]
    columns: list[list[float | None]]
    each: int
    total: int
    last: int


def curve_routes(plan: DashboardPlan, steps: StepFiles, authorizer: Authorizer) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["curves"])

    @router.get(
        "/api/runs/{run}/steps",
        dependencies=authorizer.of("reading"),
        response_model=StepColumns,
    )
    def read_steps(
        run: str,
        figure: _Figure,
        after: Annotated[int, Query(ge=0, description="Steps behind this one")] = 0,
        most: Annotated[int, Query(ge=2, le=MOST_PLACES, description="So many places at most")] = 400,
    ) -> Response:
        """Figures of the run's steps; of many, the means of as many neighbours as are needed."""
        unknown = [name for name in figure if name not in NAMES]
        if unknown:
            raise NotFoundError(f"no figure {unknown[0][:100]!r}", f"known: {', '.join(NAMES)}")
        folder = plan.runs.named(run).folder
        if folder is None:
            return _json(Steps().columns(figure))
        return _json(steps.columns_of(folder, figure, after=after, most=most))

    return router


def _json(found: Columns) -> Response:
    return Response(msgspec.json.encode(found), media_type="application/json")
