"""`GET /api/runs/{run}/steps`: curves of one run. Small whatever its length: steps are joined to places."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from services.dashboard.plan import DashboardPlan
from services.dashboard.steps import NAMES, Columns, StepFiles, Steps
from services.http.auth import Authorizer
from services.http.struct_answer import answers, struct_answer
from services.wire.errors import NotFoundError

MOST_PLACES = 1000
_Figure = Annotated[list[str], Query(min_length=1, max_length=len(NAMES), description="Names of metrics.jsonl")]


def curve_routes(plan: DashboardPlan, steps: StepFiles, authorizer: Authorizer) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["curves"])

    @router.get(
        "/api/runs/{run}/steps",
        dependencies=authorizer.of("reading"),
        responses=answers(Columns),
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
            return struct_answer(Steps().columns(figure))
        return struct_answer(steps.columns_of(folder, figure, after=after, most=most))

    return router
