"""`./dev bench staleness`: compares off-policy corrections on tokens that are K optimizer steps old.

Each run trains a warm-started tiny policy on running-sums with the trainer's own window, packing, loss and optimizer step;
all that differs is the loss and K: the policy that generates is always exactly K steps old (in the first K steps, the first
one). Judged is the trainer's policy, on held-out problems: the rewards of the lagged one hide a late collapse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.harness.command import run_measurement, show
from benchmarks.staleness.results import ARMS, UNCORRECTED, Outcome
from services.host.files import writing
from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: ./dev bench staleness --ks 4,16 --corrections none,PPO --out staleness.jsonl")
def staleness(
    ks: Annotated[str, typer.Option(help="Ages of the tokens, in optimizer steps")] = "0,1,2,4,8,16",
    corrections: Annotated[str, typer.Option(help="all, or some of the corrections by name")] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds of warm start, problems and samples")] = "1,2,3",
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps a run")] = 60,
    workers: Annotated[int, typer.Option(min=1, help="Runs that train at once, one thread each")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines of every run as it ends; those that it holds are not run again")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy over K into this file (.svg or .png)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables")] = False,
) -> None:
    """Corrections on stale tokens, judged by the trainer's policy. About twelve minutes on two cores by default."""
    from benchmarks.staleness.results import ARMS, named_arms
    from benchmarks.staleness.runs import Table, measure

    names = list(ARMS) if corrections == "all" else named_arms(corrections.split(","))
    asked = Table(names, _numbers("ks", ks), _numbers("seeds", seeds), updates, workers)
    load = os.getloadavg()
    outcomes = run_measurement(lambda scratch, say: measure(asked, scratch, out, say))
    table = finals(outcomes, GREEDY)
    if plot is not None:
        plot_finals(table, plot)
    show(
        table,
        as_json,
        as_table(outcomes, GREEDY),
        as_table(outcomes, SAMPLED),
        formulas(names, max(asked.ks)),
    )
    if not as_json:
        Console().print(judgement(outcomes, load), markup=False, highlight=False)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise UsageError(f"--{option} {text}", "give numbers with commas between them") from error
    if numbers[0] < 0:
        raise UsageError(f"--{option} {text} holds a number below 0", "leave it out")
    return numbers


def plot_finals(table: Finals, path: Path) -> None:
    """Plot held-out accuracy over K, a line for each correction: means over seeds, and a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ks = sorted({k for by_k in table.values() for k in by_k})
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, by_k) in enumerate(table.items()):
        # A little apart, so that equal values of several corrections are all seen.
        places = {k: ks.index(k) + 0.05 * (number - len(table) / 2) for k in by_k}
        [line] = axes.plot(places.values(), [fmean(values) for values in by_k.values()], label=name)
        dots = [(places[k], value) for k, values in by_k.items() for value in values]
        axes.plot(*zip(*dots, strict=True), ".", color=line.get_color(), markersize=4)
    axes.set(
        xlabel="K: age of the tokens, optimizer steps",
        ylabel="held-out accuracy of the trainer's policy, greedy",
        ylim=(0, 1.02),
        xticks=range(len(ks)),
        xticklabels=[str(k) for k in ks],
    )
    figure.legend(loc="outside right upper")
    with writing(path), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


COLLAPSED = 0.5
"""Training without a correction must end below this at K = 4 and 16, else the comparison shows nothing."""
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
