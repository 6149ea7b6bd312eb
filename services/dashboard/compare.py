"""`GET /api/compare`: runs beside one another, by what `rollmesh compare` shows: settings that differ, figures, curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Response

from services.config.load import flat_settings
from services.dashboard.look.ended import evaluation_of
from services.dashboard.open_runs import OpenRun
from services.dashboard.plan import DashboardPlan
from services.dashboard.steps import StepFigures, StepFiles
from services.http.auth import Authorizer
from services.http.struct_answer import answers, struct_answer
from services.observability.run_view.run_curves import AXES, FIGURES, bands_of, figures_of
from services.policies.progress.curves import Axis, differences
from services.wire.errors import NotFoundError
from services.wire.run_metrics import EvaluationReport

MOST_RUNS = 12
_WORDS = 200
"""Characters of a setting's value that are told."""


@dataclass(frozen=True)
class ComparedRun:
    """See `services.observability.run_view.run_curves.Compared`."""

    name: str
    settings: Mapping[str, object]
    lines: Sequence[StepFigures]
    evaluation: EvaluationReport | None


class Row(msgspec.Struct, frozen=True):
    """`values[i]`: of run i; None for a setting that it does not have."""

    name: str
    values: list[str | None]


class Curve(msgspec.Struct, frozen=True):
    """`name`: of the arm's first run, how many others, and what its band is; `low`, `high`: of the band at that place."""

    name: str
    xs: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class Panel(msgspec.Struct, frozen=True):
    figure: str
    title: str
    curves: list[Curve]


class Comparison(msgspec.Struct, frozen=True):
    """`axis`: what the curves are drawn over, in words."""

    runs: list[str]
    axis: str
    settings: list[Row]
    figures: list[Row]
    panels: list[Panel]


def compared(runs: Sequence[ComparedRun], by: Axis) -> Comparison:
    """Pure."""
    differ = differences([run.settings for run in runs])
    return Comparison(
        runs=[run.name for run in runs],
        axis=AXES[by],
        settings=[
            Row(name, [None if value is None else str(value)[:_WORDS] for value in values])
            for name, values in differ.items()
        ],
        figures=[Row(name, list(values)) for name, values in figures_of(runs)],
        panels=[
            Panel(
                figure,
                title,
                [
                    Curve(name, band.xs, band.mean, band.low, band.high)
                    for name, band in bands_of(runs, figure, by)
                    if band.xs
                ],
            )
            for figure, title in FIGURES.items()
        ],
    )


def compare_routes(plan: DashboardPlan, steps: StepFiles, authorizer: Authorizer) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["curves"])

    @router.get("/api/compare", dependencies=authorizer.of("reading"), responses=answers(Comparison))
    def compare(
        run: Annotated[list[str], Query(min_length=1, max_length=MOST_RUNS, description="Names of runs")],
        by: Annotated[Literal["step", "tokens", "time"], Query(description="What curves are drawn over")] = "step",
    ) -> Response:
        """Settings that differ, figures, and curves; runs that differ in the seed alone are one curve with a band."""
        found = compared([_read(plan.runs.named(name), steps) for name in dict.fromkeys(run)], by)
        return struct_answer(found)

    return router


def _read(run: OpenRun, steps: StepFiles) -> ComparedRun:
    """Raises NotFoundError for a run that has no folder here, UsageError where its configuration cannot be read."""
    if run.folder is None:
        raise NotFoundError(f"the run {run.name} has no folder on this machine", "compare where its folder is")
    settings = flat_settings(run.folder.config)
    return ComparedRun(run.name, settings, steps.lines_of(run.folder), evaluation_of(run.folder.evaluation))
