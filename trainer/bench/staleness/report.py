"""The staleness table: accuracies by correction and K, which promises they keep, as JSON and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Literal

from rich.table import Table

from trainer.bench.staleness.arms import ARMS, UNCORRECTED
from trainer.bench.staleness.results import Outcome

COLLAPSED = 0.5
"""What training without a correction is to end below, at K = 4 and 16: else the table shows nothing."""
GOOD_AT_4, GOOD_AT_16 = 0.9, 0.88

Judge = Literal["greedy", "sampled"]
GREEDY: Judge = "greedy"
SAMPLED: Judge = "sampled"

Finals = Mapping[str, Mapping[int, Sequence[float]]]
"""Held-out accuracy of the trainer's policy at the end of each seed's run, by correction and K."""


def finals(outcomes: Sequence[Outcome], judge: Judge) -> dict[str, dict[int, list[float]]]:
    """In the order of the outcomes."""
    found: dict[str, dict[int, list[float]]] = {}
    for outcome in outcomes:
        value = round(getattr(outcome, judge), 4)
        found.setdefault(outcome.run.correction, {}).setdefault(outcome.run.k, []).append(value)
    return found


def bars(table: Finals) -> dict[str, bool]:
    """Which promises hold, of those that the table is large enough to judge. Means over seeds."""
    means = {name: {k: fmean(values) for k, values in by_k.items()} for name, by_k in table.items()}
    uncorrected = means.pop(UNCORRECTED, {})
    judged = {
        f"{UNCORRECTED} ≤ {COLLAPSED:g} at K={k}": uncorrected[k] <= COLLAPSED for k in (4, 16) if k in uncorrected
    }
    for k, good, wanted in ((4, GOOD_AT_4, 2), (16, GOOD_AT_16, 1)):
        corrected = [by_k[k] for by_k in means.values() if k in by_k]
        if corrected:
            judged[f"{wanted} corrected ≥ {good:g} at K={k}"] = sum(mean >= good for mean in corrected) >= wanted
    return judged


def as_table(outcomes: Sequence[Outcome], judge: Judge) -> Table:
    """Mean over seeds, and the worst seed beside it."""
    ks = list(dict.fromkeys(outcome.run.k for outcome in outcomes))
    seeds = len({outcome.run.seed for outcome in outcomes})
    shown = Table(title=f"Held-out accuracy, {judge} answers: mean and worst of {seeds} seeds")
    shown.add_column("correction", no_wrap=True)
    for k in ks:
        shown.add_column(f"K={k}", justify="right")
    for name, by_k in finals(outcomes, judge).items():
        shown.add_row(name, *(f"{_share(fmean(by_k[k]))} {_share(min(by_k[k]))}" for k in ks))
    return shown


def judgement(outcomes: Sequence[Outcome], load_before: tuple[float, float, float]) -> str:
    """Which promises hold, and what was measured how."""
    lines = [f"{name}: {'yes' if holds else 'NO'}" for name, holds in bars(finals(outcomes, GREEDY)).items()]
    seconds = [outcome.seconds for outcome in outcomes]
    lines.append(f"seconds a run: median {median(seconds):.1f}, {min(seconds):.1f} to {max(seconds):.1f}")
    lines.append(f"load before: {', '.join(f'{figure:.2f}' for figure in load_before)}")
    lines.append(", ".join(f"{name} {number}" for name, number in outcomes[0].versions.items()))
    return "\n".join(lines)


def formulas(corrections: Sequence[str], k: int) -> Table:
    """The loss in force under each correction."""
    shown = Table(title="Losses")
    shown.add_column("correction")
    shown.add_column("formula", overflow="fold")
    for name in corrections:
        shown.add_row(name, ARMS[name].formula(k))
    return shown


def _share(value: float) -> str:
    return f"{value:.2f}".removeprefix("0")
