"""`rollmesh compare`: runs beside one another, in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.host.files import writing
from services.observability.run_view.run_curves import AXES, FIGURES, bands_of, figures_of
from services.observability.run_view.run_files import RunFiles
from services.observability.terminal import sparkline
from services.policies.progress.curves import Axis, differences
from services.wire.errors import UsageError
from services.wire.extras import install

_WIDTH = 40
_MOST_COLUMNS = 3


def comparison(runs: Sequence[RunFiles], axis: Axis) -> RenderableType:
    """Settings that differ, the runs' figures, and success as sparklines."""
    parts: list[RenderableType] = [_settings(runs), Text(), _beside("figure", figures_of(runs), runs), Text()]
    parts += [Text(f"success of the batch, by {AXES[axis]}", style="bold"), _success(runs, axis)]
    return Group(*parts)


def _settings(runs: Sequence[RunFiles]) -> RenderableType:
    differ = differences([run.settings for run in runs])
    if not differ:
        return Text("all settings are equal")
    told = [(name, ["–" if value is None else str(value) for value in values]) for name, values in differ.items()]
    return _beside("setting", told, runs)


def _beside(what: str, told: Sequence[tuple[str, Sequence[str]]], runs: Sequence[RunFiles]) -> Table:
    """A column for each run; of many runs, which would be too narrow, a row."""
    names = [run.name for run in runs]
    across = len(runs) <= _MOST_COLUMNS
    header = [what, *names] if across else ["run", *(name for name, _ in told)]
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for name, values in told if across else zip(names, zip(*(values for _, values in told), strict=True), strict=True):
        table.add_row(name, *values)
    return table


def _success(runs: Sequence[RunFiles], axis: Axis) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, band in bands_of(runs, "success", axis):
        ends = f"{band.mean[0]:.2f} to {band.mean[-1]:.2f}, up to {band.xs[-1]:,.0f}" if band.xs else "no step yet"
        if band.kind != "none":
            ends += f", its band there {band.low[-1]:.2f} to {band.high[-1]:.2f}"
        table.add_row(name, sparkline(band.mean, 0.0, 1.0, _WIDTH), ends)
    return table


def draw(runs: Sequence[RunFiles], axis: Axis, path: Path) -> None:
    """Write the curves with their bands as a picture. Raises UsageError where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UsageError("--plot needs matplotlib, which is not installed", install("torch")) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(nrows=2, ncols=3, figsize=(14, 7), layout="constrained")
    for panel, (name, title) in zip(axes.flat, FIGURES.items(), strict=True):
        for label, band in bands_of(runs, name, axis):
            (line,) = panel.plot(band.xs, band.mean, label=label)
            panel.fill_between(band.xs, band.low, band.high, alpha=0.2, color=line.get_color(), linewidth=0)
        panel.set(title=title, xlabel=AXES[axis])
    axes.flat[0].set_ylim(0, 1.02)
    axes.flat[0].legend(fontsize="small")
    with writing(path):
        figure.savefig(path, dpi=100)
    pyplot.close(figure)
