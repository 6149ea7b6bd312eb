"""`rollmesh bench staleness`: which correction keeps training sound on tokens that are K optimizer steps old.

Each run trains a warm-started tiny policy on running-sums with the trainer's own window, packing, loss and optimizer step;
all that differs is the loss and K: the policy that draws is always exactly K steps old (in the first K steps, the first
one). Judged is the trainer's policy, on held-out problems: the rewards of the lagged one hide a late collapse.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: rollmesh bench staleness --ks 4,16 --corrections none,PPO --out staleness.jsonl")
def staleness(
    ks: Annotated[str, typer.Option(help="Ages of the tokens, in optimizer steps")] = "0,1,2,4,8,16",
    corrections: Annotated[str, typer.Option(help="all, or some of the corrections by name")] = "all",
    seeds: Annotated[str, typer.Option(help="Seeds of warm start, problems and draws")] = "1,2,3",
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps a run")] = 60,
    workers: Annotated[int, typer.Option(min=1, help="Runs that train at once, one thread each")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="JSON lines of every run as it ends; those that it holds are not run again")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy over K into this file (.svg or .png)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables")] = False,
) -> None:
    """Corrections on stale tokens, judged by the trainer's policy. About twelve minutes on two cores by default."""
    import msgspec

    from trainer.bench.staleness.arms import ARMS, named_arms
    from trainer.bench.staleness.measuring import Table, measure
    from trainer.bench.staleness.plot import plot_finals
    from trainer.bench.staleness.report import GREEDY, SAMPLED, as_table, finals, formulas, judgement

    names = list(ARMS) if corrections == "all" else named_arms(corrections.split(","))
    asked = Table(names, _numbers("ks", ks), _numbers("seeds", seeds), updates, workers)
    say = Console(stderr=True, soft_wrap=True, highlight=False)
    load = os.getloadavg()
    # Ended as Ctrl-C ends it, so that nothing that was started stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        outcomes = asyncio.run(measure(asked, Path(scratch), out, say.print))
    table = finals(outcomes, GREEDY)
    if plot is not None:
        plot_finals(table, plot)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(table), indent=2).decode() + "\n")
    else:
        for shown in (as_table(outcomes, GREEDY), as_table(outcomes, SAMPLED), formulas(names, max(asked.ks))):
            Console().print(shown)
        Console().print(judgement(outcomes, load), markup=False, highlight=False)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError as error:
        raise UsageError(f"--{option} {text}", "give numbers with commas between them") from error
    if numbers[0] < 0:
        raise UsageError(f"--{option} {text} holds a number below 0", "leave it out")
    return numbers
