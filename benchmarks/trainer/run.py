"""`./dev bench trainer`: packing against padding and TRL, asynchronous against synchronous training."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.command import progress, show

app = typer.Typer(add_completion=False, rich_markup_mode=None)

TRL_PYTHON = Path(".venv-trl/bin/python")


@app.command(epilog="Example: ./dev bench trainer --rounds 5 --json")
def trainer(
    rounds: Annotated[
        int, typer.Option(min=1, help="Steps of each arm, interleaved, after one that is not counted")
    ] = 5,
    paced_rounds: Annotated[
        int, typer.Option(min=0, help="Pairs of meshes with engines that generate by the clock, some minutes each")
    ] = 1,
    peak_rounds: Annotated[
        int, typer.Option(min=0, help="Pairs of processes whose peak of memory is measured, two minutes each, 14 GB")
    ] = 1,
    kills: Annotated[
        int, typer.Option(min=0, help="Kills of ranks in a run of two, a quarter of a minute each; 0: no such run")
    ] = 20,
    errors: Annotated[
        bool, typer.Option(help="Whether 1, 2 and 4 ranks are held against one process, a quarter of an hour, 2 GB")
    ] = True,
    plans: Annotated[
        bool, typer.Option(help="Whether plans of memory are held against processes and the formula, ten minutes, 3 GB")
    ] = True,
    all_plans: Annotated[
        bool, typer.Option("--all-plans", help="All models under all options in place of each once: half an hour")
    ] = False,
    plans_of: Annotated[
        str | None,
        typer.Option(help="Nothing but plans, of models and options with these words in their name, such as bfloat16"),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of each arm")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, lengths and tokens")] = 1,
    trl_python: Annotated[Path, typer.Option(help="Python of the environment that holds TRL")] = TRL_PYTHON,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """Trained tokens a second on heavy-tailed lengths: packed, padded, and TRL's; asynchronous and synchronous."""
    from benchmarks.harness.processes import versions
    from benchmarks.trainer.report import Measured, as_table, put_together
    from services.host.process import heavy_imports

    with heavy_imports():
        from benchmarks.trainer.checkpoints import measure_copy, measure_slow_disk
        from benchmarks.trainer.device import measure_device
        from benchmarks.trainer.evaluating import measure_evaluating
        from benchmarks.trainer.idleness import measure_rounds
        from benchmarks.trainer.killed_ranks import measure_killed_ranks
        from benchmarks.trainer.peaks import measure_peaks
        from benchmarks.trainer.plan_cases import EVERY, LARGE, named
        from benchmarks.trainer.planned import measure_plans
        from benchmarks.trainer.prefixes import measure_prefixes
        from benchmarks.trainer.rank_errors import measure_rank_errors
        from benchmarks.trainer.ranks import measure_ranks, measure_smollm2_ranks
        from benchmarks.trainer.step_speed import HeavyTail, SpeedPlan, measure_speed, with_long_prompts

    say = progress()
    load = os.getloadavg()
    python = trl_python if trl_python.exists() else None

    def speed(plan: SpeedPlan) -> Measured:
        with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
            return asyncio.run(measure_speed(plan, python, Path(scratch), say))

    if plans_of is not None:
        cases, large = named(plans_of)
        parts = [asyncio.run(measure_plans(say, threads, cases, large))]
        bench = put_together(parts, load, versions("rollmesh", "torch", "transformers"))
        show(bench, as_json, as_table(bench))
        return
    parts = [
        speed(SpeedPlan(rounds, threads, seed)),
        speed(SpeedPlan(rounds, threads, seed, HeavyTail(vocabulary=32_764), suffix="_32k")),
        with_long_prompts(speed(SpeedPlan(rounds, threads, seed, HeavyTail(prompt=256), suffix="_shared"))),
        asyncio.run(measure_prefixes(rounds, threads, seed, say)),
        asyncio.run(measure_peaks(peak_rounds, threads, say)),
        measure_copy(rounds, threads, say),
        measure_device(rounds, say),
        asyncio.run(measure_rounds(paced_rounds, seed, say)),
        asyncio.run(measure_evaluating(paced_rounds, say)),
        asyncio.run(measure_slow_disk(paced_rounds, say)),
        asyncio.run(measure_ranks(rounds, say)),
        asyncio.run(measure_smollm2_ranks(peak_rounds, say)),
    ]
    if kills:
        parts.append(asyncio.run(measure_killed_ranks(seed, say, kills=kills)))
    if errors:
        parts.append(asyncio.run(measure_rank_errors(say)))
    if all_plans:
        parts.append(asyncio.run(measure_plans(say, threads, EVERY, LARGE)))
    elif plans:
        parts.append(asyncio.run(measure_plans(say, threads)))
    bench = put_together(parts, load, versions("rollmesh", "torch", "transformers"))
    show(bench, as_json, as_table(bench))
