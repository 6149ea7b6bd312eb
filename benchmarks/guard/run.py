"""`./dev bench guard`: whether this checkout costs more than another commit, by the figures that wander least.

Whole meshes of both run in turns (`benchmarks.guard.mesh_run`): CPU by service a step and at the start, the event loop's
and the stream's a trajectory, the trainer's a token, memory of each service before the first group. Between them agents
call a gateway of both in turns (`benchmarks.guard.calls`): CPU by service a chat completion. A figure is worse
where its ratio (`benchmarks.guard.ratios`) lies above ALLOWED by more than its standard error. Wall time is shown, not
judged.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.guard.calls import make_calls, standing_fleet
from benchmarks.guard.mesh_run import run_mesh
from benchmarks.guard.ratios import ALLOWED, ratios_of, worse_of
from benchmarks.harness.against import Comparison, in_turns, table_of
from benchmarks.harness.command import Say, run_measurement, show
from benchmarks.harness.revision import HERE, checkout, here
from benchmarks.harness.servers import client

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_SEED = 1


class Guard(msgspec.Struct, frozen=True):
    """What `--json` prints. `worse`: the names of figures that are."""

    comparison: Comparison
    worse: list[str]


@app.command(epilog="Example: ./dev bench guard --against HEAD~3")
def guard(
    against: Annotated[str, typer.Option(metavar="REV", help="The commit to compare with")] = "HEAD~1",
    pairs: Annotated[int, typer.Option(min=3, help="Runs of each checkout, in turns")] = 15,
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps a run")] = 80,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """Compare with another commit; exit code 1 where something costs over 10 % more. 10 minutes with the defaults."""
    result = run_measurement(lambda folder, say: _measure(folder, say, against, pairs, steps))
    table = table_of(result.comparison)
    table.caption = (
        f"{_verdict(result)}\n{table.caption}\nof CPU less what the services of a pair have in common by chance"
    )
    show(result, as_json, table)
    if result.worse:
        raise typer.Exit(1)


async def _measure(folder: Path, say: Say, against: str, pairs: int, steps: int) -> Guard:
    load, ours = os.getloadavg(), here()
    theirs = await asyncio.to_thread(checkout, against, say)
    say("making the policy that all runs begin with")
    first = folder / "first"
    await run_mesh(ours, first, model=None, steps=12, seed=_SEED)
    model = folder / "model"
    shutil.copytree(first / "model", model)
    count = 0
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(client())
        say("starting a gateway and a rollout server of each, for agents' calls")
        exchanges = await asyncio.to_thread(make_calls, folder / "calls-model")
        agents = {
            arm.name: await stack.enter_async_context(standing_fleet(arm, folder / "calls-model", exchanges, http))
            for arm in (ours, theirs)
        }

        async def run(arm: str) -> dict[str, float]:
            nonlocal count
            count += 1
            place = folder / f"run-{count}"
            figures = await run_mesh(ours if arm == HERE else theirs, place, model=model, steps=steps, seed=_SEED)
            shutil.rmtree(place)
            return figures | await agents[arm].figures()

        runs = await in_turns(HERE, theirs.name, pairs, run, say)
    figures = ratios_of(runs[HERE], runs[theirs.name])
    return Guard(Comparison("guard", theirs.name, pairs, load, figures), worse_of(figures))


def _verdict(result: Guard) -> str:
    if not result.worse:
        return f"nothing costs over {ALLOWED - 1:.0%} more than in {result.comparison.against}"
    return f"worse than in {result.comparison.against}: {', '.join(result.worse)}"
