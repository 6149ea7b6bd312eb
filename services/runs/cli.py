"""`rollmesh runs`, `rollmesh compare` and `rollmesh samples`. Nothing heavy is imported before a command is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.config import options
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from services.host.run_folder import RunFolder
    from services.observability.run_view.run_files import Listed
    from services.wire.run_metrics import Sample

runs_app = typer.Typer(add_completion=False, rich_markup_mode=None)
compare_app = typer.Typer(add_completion=False, rich_markup_mode=None)
samples_app = typer.Typer(add_completion=False, rich_markup_mode=None)

Root = Annotated[Path, typer.Option("--root", metavar="DIR", help="Folder that run folders lie in")]
_RUNS = Path("runs")


class AxisName(StrEnum):
    """What curves are drawn over."""

    step = "step"
    tokens = "tokens"
    time = "time"


class Order(StrEnum):
    """What samples are sorted by, the largest first but for `step`."""

    step = "step"
    reward = "reward"
    length = "length"


@runs_app.callback(invoke_without_command=True, epilog="Example: rollmesh runs")
def runs(context: typer.Context, root: Root = _RUNS, as_json: options.Json = False) -> None:
    """List runs, the newest first: state, steps, success and size.

    Success: of held-out problems before and after training, or of the last batch where a run has not ended.
    """
    if context.invoked_subcommand is not None:
        if as_json or root != _RUNS:
            raise UsageError(
                f"--root and --json are of the list, and {context.invoked_subcommand} does not read them",
                f"write --root behind {context.invoked_subcommand}",
            )
        return
    import msgspec

    from services.host.run_folder import run_folders
    from services.observability.run_view.run_files import listed, read_run

    lines = []
    for folder in run_folders(root):
        try:
            lines.append(listed(read_run(folder)))
        except UsageError as error:
            sys.stderr.write(f"rollmesh: {folder.root} is left out: {error}\n")
    if as_json:
        sys.stdout.writelines(msgspec.json.encode(line).decode() + "\n" for line in lines)
    elif not lines:
        sys.stdout.write(f"there is no run in {root}\n")
    else:
        _show_runs(lines)


@runs_app.command(epilog="Example: rollmesh runs remove running-sums-20261126-114634-c2a5")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs, or paths")], root: Root = _RUNS
) -> None:
    """Remove runs: the whole folder of each. One that runs is refused, and then none is removed."""
    from services.host.run_folder import found_run

    _remove([found_run(name, root) for name in names])


@runs_app.command(epilog="Example: rollmesh runs prune --keep 5")
def prune(
    keep: Annotated[int, typer.Option(min=0, help="How many of the newest stay")],
    root: Root = _RUNS,
    interrupted: Annotated[
        bool, typer.Option("--interrupted", help="Remove interrupted runs alone; those that are done stay")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
) -> None:
    """Remove all runs but the newest. A run that runs stays."""
    from services.host.run_folder import is_held, run_folders

    older = [folder for folder in run_folders(root)[keep:] if not is_held(folder)]
    older = [folder for folder in older if not (interrupted and folder.summary.exists())]
    for folder in older:
        sys.stdout.write(f"{folder.root}\n")
    if older and not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{len(older)} runs would be removed", "add --yes")
        typer.confirm(f"remove these {len(older)} runs?", abort=True)
    _remove(older)


def _remove(folders: Sequence[RunFolder]) -> None:
    from services.observability.run_view.run_files import remove

    freed = remove(folders)
    sys.stdout.write(f"removed {len(folders)} runs, {_bytes(freed)}\n")


def _show_runs(lines: Sequence[Listed]) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.table import Table

    table = Table("run", "began", "state", "task", "step", "success", "size", box=None, pad_edge=False)
    for line in lines:
        began = datetime.fromtimestamp(line.began_at).astimezone().strftime("%F %H:%M")
        name, steps = Path(line.path).name, f"{line.step}/{line.steps}"
        table.add_row(name, began, line.state, line.task, steps, _success(line), _bytes(line.size_bytes))
    Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty()).print(table)


def _success(line: Listed) -> str:
    if line.success_before is not None and line.success_after is not None:
        within = line.success_interval_after
        shown = "" if within is None else f" ({100 * within[0]:.0f} to {within[1]:.0%})"
        return f"{line.success_before:.0%} → {line.success_after:.0%}{shown}"
    return "–" if line.success is None else f"{line.success:.0%} of a batch"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


@compare_app.command(epilog="Example: rollmesh compare runs/a runs/b --by tokens --plot compare.png")
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Two or more runs: names or paths")],
    root: Root = _RUNS,
    by: Annotated[AxisName, typer.Option(help="What curves are drawn over")] = AxisName.step,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the curves as a picture, too")] = None,
) -> None:
    """Compare runs: settings that differ, figures, and curves.

    Runs that differ in the seed alone are one curve with a band: of three or more the 95 % interval of their mean, of two
    from one to the other. Time counts from a run's first step.
    """
    from rich.console import Console

    from services.host.run_folder import found_run
    from services.observability.run_view.run_files import read_run
    from services.runs.compare import comparison, draw

    if len(names) < 2:
        raise UsageError("one run is nothing to compare", "name two or more: `rollmesh runs` lists them")
    found = [read_run(found_run(name, root)) for name in names]
    Console(highlight=False, markup=False).print(comparison(found, by.value))
    if plot is not None:
        draw(found, by.value, plot)
        sys.stdout.write(f"curves: {plot}\n")


@samples_app.command(epilog="Example: rollmesh samples --step 40..60 --reward 0..0.5 --text '12+'")
def samples(
    name: Annotated[str | None, typer.Argument(metavar="RUN", help="A run; left out: the newest")] = None,
    root: Root = _RUNS,
    step: Annotated[str | None, typer.Option(metavar="N|N..M", help="Of this step, or of these")] = None,
    reward: Annotated[str | None, typer.Option(metavar="X|X..Y", help="With this reward, or between these")] = None,
    length: Annotated[str | None, typer.Option(metavar="N|N..M", help="With so many sampled tokens")] = None,
    text: Annotated[str | None, typer.Option(metavar="WORDS", help="With these words in prompt or answer")] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Of this task")] = None,
    sort: Annotated[Order, typer.Option(help="step: the newest last; reward, length: the largest last")] = Order.step,
    last: Annotated[int, typer.Option(min=1, help="Show so many at most, the last of them")] = 10,
    as_json: options.Json = False,
) -> None:
    """Read rollouts of a run: prompt, answer, reward, and the policy versions that sampled it.

    How many a run keeps, samples.share, samples.max_bytes and samples.cpu_share say. What the policy sampled is bold.
    """
    import msgspec
    from rich.console import Console

    from services.host.run_folder import found_run
    from services.observability.terminal import SAMPLED_BEGINS, SAMPLED_ENDS
    from services.run_store.rollouts.search import range_of
    from services.runs.samples import Wanted, choose

    folder = found_run(name, root)
    between = range_of("--step", step), range_of("--reward", reward), range_of("--length", length)
    chosen = choose(folder, Wanted(*between, text, task, sort.value), last)
    if as_json:
        sys.stdout.writelines(msgspec.json.encode(sample).decode() + "\n" for sample in chosen.shown)
        return
    console = Console(highlight=False, markup=False)
    for sample in chosen.shown:
        _show_sample(console, sample)
    of = str(chosen.count) if chosen.counted else "more"
    others = "" if chosen.count else _steps_of(chosen.kept)
    marks = f"; {SAMPLED_BEGINS}sampled{SAMPLED_ENDS}" if chosen.shown and not console.is_terminal else ""
    console.print(f"{len(chosen.shown)} of {of} samples, of {folder.root}{others}{marks}", soft_wrap=True)


def _steps_of(kept: tuple[int, int] | None) -> str:
    """Which there are, for one who asked for others."""
    return ": none are kept" if kept is None else f": samples of steps {kept[0]} to {kept[1]} are kept"


def _show_sample(console: Console, sample: Sample) -> None:
    from rich.text import Text

    from services.observability.terminal import HEAD, NOTE, as_text, sampled_text

    length = "" if sample.tokens is None else f" · {sample.tokens} tokens"
    versions = ", ".join(map(str, sample.versions))
    head = f"step {sample.step} · {sample.task} · reward {sample.reward:g}{length} · version {versions}"
    console.print(Text(as_text(head), style=HEAD))
    if sample.components:
        parts = ", ".join(f"{name} {value:g}" for name, value in sample.components.items())
        console.print(Text(f"  components: {as_text(parts)}", style=NOTE))
    for segment in sample.segments:
        if segment.break_reason is not None:
            console.print(Text(f"  a new segment: {as_text(segment.break_reason)}", style=NOTE))
        console.print(sampled_text(segment, lines=True, marked=not console.is_terminal))
    console.print()
