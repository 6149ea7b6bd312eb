"""Curves of runs beside one another: which figures, over what, and the arms that runs of other seeds make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from services.policies.progress.curves import Axis, Band, BandKind, StepLine, arms, banded, curve_of
from services.policies.training.evaluation import interval
from services.wire.run_metrics import EvaluationReport

FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "success": "success of the batch",
        "reward": "reward",
        "response_length": "response length, tokens",
        "entropy": "entropy, nats a token",
        "staleness_mean": "staleness, steps",
        "tokens_per_s": "tokens a second",
    }
)
"""A figure of metrics.jsonl → what it is."""
AXES: Mapping[Axis, str] = MappingProxyType(
    {"step": "optimizer step", "tokens": "trained tokens", "time": "seconds since the first step"}
)


BANDS: Mapping[BandKind, str] = MappingProxyType(
    {"none": "", "extremes": ", lowest to highest", "mean": ", mean with 95 % interval"}
)
"""What the band of a curve is, behind its name."""


class Compared(Protocol):
    """A run beside others. `settings`: by dotted name."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, object]: ...
    @property
    def lines(self) -> Sequence[SummedLine]: ...
    @property
    def evaluation(self) -> EvaluationReport | None: ...


class SummedLine(StepLine, Protocol):
    @property
    def success(self) -> float: ...


def bands_of(runs: Sequence[Compared], figure: str, axis: Axis) -> list[tuple[str, Band]]:
    """The arms' names, with what their bands are, and curves."""
    named = []
    for arm in arms(runs, [run.settings for run in runs]):
        more = f" and {len(arm) - 1} of other seeds" if len(arm) > 1 else ""
        band = banded([curve_of(run.lines, figure, axis) for run in arm])
        named.append((f"{arm[0].name}{more}{BANDS[band.kind]}", band))
    return named


def figures_of(runs: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    """Rows of a table: what a figure is, and its value in each run, in words."""
    last = [run.lines[-1] if run.lines else None for run in runs]
    held_out = [run.evaluation for run in runs]
    spans = [run.lines[-1].time - run.lines[0].time if run.lines else 0.0 for run in runs]
    return [
        ("steps", ["0" if line is None else str(line.step) for line in last]),
        ("held out, before", [_held_out(each, after=False) for each in held_out]),
        ("held out, after", [_held_out(each, after=True) for each in held_out]),
        ("success, last batch", ["–" if line is None else f"{line.success:.1%}" for line in last]),
        ("tokens trained", [f"{sum(line.tokens for line in run.lines):,}" for run in runs]),
        ("first to last step", [f"{span:,.0f} s" for span in spans]),
    ]


def _held_out(report: EvaluationReport | None, *, after: bool) -> str:
    """With the interval at 95 %, where the answers to each problem were written down."""
    if report is None:
        return "–"
    success = report.success_after if after else report.success_before
    solved = report.solved_after if after else report.solved_before
    if not solved:
        return f"{success:.1%}"
    found = interval(solved, report.samples, report.different)
    return f"{success:.1%} ({found.low:.1%} to {found.high:.1%})"
