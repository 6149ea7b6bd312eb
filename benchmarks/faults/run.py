"""`./dev bench faults`: what the death of each service, a cut-off Redis and a cut file cost a run under default settings.

For each kind of fault one run of the mesh with two servers, in which the fault is made several times, each at a random
moment after the killed process has lived long enough to be started again at once. The figure is the longest gap between
two optimizer steps that follows a fault, less the run's median gap (`excesses`). For the trainer, which is
itself what makes the steps, the time that its next process needs to import and to load the model is taken off as well.
`noisy-trainer`: the trainer is killed beside a newest checkpoint that was nudged, so that it repeats its steps with other
bytes; `resume_conflicts` must be 0.

At its end each run must balance: every published trajectory was trained once or dropped, no step is missing or made twice,
no token over K was trained on, and the engines serve the trainer's bytes.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from benchmarks.faults.mesh import MeshUnderFaults, RedisLink, logged_at, mesh_under_faults, redis_behind_link
from benchmarks.harness.command import Say, run_measurement, show
from benchmarks.harness.processes import versions
from benchmarks.harness.timing import percentile
from services.supervisor.summary import Summary
from trainer.metrics.files import read_metrics

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Fault(StrEnum):
    GATEWAY = "gateway"
    ENVIRONMENT = "environment"
    SERVER = "server"
    BUS = "bus"
    VALKEY = "valkey"
    TRAINER = "trainer"
    NOISY_TRAINER = "noisy-trainer"
    PARTITION = "partition"
    CUT_FILE = "cut-file"


_COMMANDS = {
    Fault.GATEWAY: "gateway",
    Fault.ENVIRONMENT: "run-environment",
    Fault.SERVER: "rollout-server",
    Fault.BUS: "weight-bus",
    Fault.VALKEY: "valkey",
    Fault.TRAINER: "train",
    Fault.NOISY_TRAINER: "train",
    Fault.CUT_FILE: "valkey",
}
_BAR_S = 5.0
_STEPS_BEFORE, _STEPS_AFTER = 20, 12
_STEPS_A_FAULT = 320
"""About half a minute: a process lives 21 s before it is killed."""
_LATEST_S = 2.0


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Seconds."""

    fault: str
    median_gap_s: float
    excess_s: list[float]
    """Of each fault: its longest gap less the median one, and for the trainer less its start."""
    p95_s: float
    bar_s: float
    """What `p95_s` is held against: 5 s, and for a partition its length besides."""
    starts_s: list[float] = []
    """Imports and loading of each new trainer."""
    cut_bytes: list[int] = []
    resume_conflicts: int | None = None
    """Of the trainer, killed beside a checkpoint that was nudged: refusals of a version at the bus."""
    skipped_versions: int | None = None
    """How many versions it went on above, one a restart; less where a newer checkpoint was written just before the kill."""
    wrong: list[str]
    """What does not balance at the end; empty is as it should be."""


class FaultsBench(msgspec.Struct, frozen=True, kw_only=True):
    faults: list[FaultReport]
    load_before: tuple[float, float, float]
    cores: int
    versions: dict[str, str]


@app.command(epilog="Example: ./dev bench faults --fault gateway --fault trainer --count 10 --json")
def faults(
    fault: Annotated[list[Fault] | None, typer.Option(help="Kind of fault; repeat it for more; default: all")] = None,
    count: Annotated[int, typer.Option(min=1, help="Faults of each kind")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the runs and of the moments")] = 1,
    steps: Annotated[int | None, typer.Option(min=40, help="Optimizer steps a run; default: 320 a fault")] = None,
    servers: Annotated[int, typer.Option(min=1, help="Rollout servers")] = 2,
    partition_s: Annotated[float, typer.Option(min=1.0, help="Seconds for which Redis is cut off")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """Services killed, Redis cut off and its file cut short in a whole mesh: the gaps between steps, and the balance."""
    load = os.getloadavg()

    async def measure(scratch: Path, say: Say) -> list[FaultReport]:
        plan = _Plan(scratch, count, seed, steps or _STEPS_BEFORE + count * _STEPS_A_FAULT, servers, partition_s)
        return [await _measure(kind, plan, say) for kind in fault or list(Fault)]

    bench = FaultsBench(
        faults=run_measurement(measure),
        load_before=load,
        cores=os.cpu_count() or 1,
        versions=versions("rollmesh", "torch", "transformers"),
    )
    show(bench, as_json, _table(bench))


class _Plan(msgspec.Struct, frozen=True):
    scratch: Path
    count: int
    seed: int
    steps: int
    servers: int
    partition_s: float


class _Made(msgspec.Struct):
    """Faults made so far: Unix seconds, and bytes cut off the append-only file."""

    at: list[float] = []
    cut_bytes: list[int] = []


async def _measure(kind: Fault, plan: _Plan, say: Say) -> FaultReport:
    rng = random.Random(f"{plan.seed} {kind}")
    made = _Made()
    async with AsyncExitStack() as stack:
        url = link = None
        if kind is Fault.PARTITION:
            url, link = await stack.enter_async_context(redis_behind_link(plan.scratch / "redis"))
        folder = plan.scratch / kind
        mesh = await stack.enter_async_context(
            mesh_under_faults(folder, seed=plan.seed, steps=plan.steps, servers=plan.servers, redis_url=url)
        )
        await mesh.wait_for_steps(_STEPS_BEFORE)
        for number in range(plan.count):
            await _make(kind, mesh, link, plan, rng, made)
            await mesh.wait_for_steps(_STEPS_AFTER)
            say(f"{kind} {number + 1} of {plan.count}: +{_latest(mesh, made):.1f} s")
        summary = await mesh.end()
        return _judge(kind, mesh, made, summary, plan)


async def _make(
    kind: Fault, mesh: MeshUnderFaults, link: RedisLink | None, plan: _Plan, rng: random.Random, made: _Made
) -> None:
    """Make the next fault at a random moment."""
    if link is not None:
        await asyncio.sleep(rng.uniform(0.0, _LATEST_S))
        made.at.append(time.time())
        await link.cut(plan.partition_s)
        return
    victim = await mesh.oldest(_COMMANDS[kind], plan.servers if kind is Fault.SERVER else 1)
    await asyncio.sleep(rng.uniform(0.0, _LATEST_S))
    made.at.append(time.time())
    if kind is Fault.CUT_FILE:
        made.cut_bytes.append(mesh.cut_append_only_file(victim, rng))
    else:
        if kind is Fault.NOISY_TRAINER:
            mesh.nudge_newest_checkpoint()
        victim.kill()


def _latest(mesh: MeshUnderFaults, made: _Made) -> float:
    return excesses(mesh.step_times(), made.at[-1:])[0]


def _judge(kind: Fault, mesh: MeshUnderFaults, made: _Made, summary: Summary, plan: _Plan) -> FaultReport:
    times = mesh.step_times()
    found = excesses(times, made.at)
    starts = _starts(mesh, made.at) if kind in (Fault.TRAINER, Fault.NOISY_TRAINER) else []
    noisy = kind is Fault.NOISY_TRAINER
    if starts:
        found = [excess - start for excess, start in zip(found, starts, strict=True)]
    return FaultReport(
        fault=kind,
        median_gap_s=round(median_gap(times), 3),
        excess_s=[round(excess, 2) for excess in found],
        p95_s=round(percentile(found, 95), 2),
        bar_s=_BAR_S + (plan.partition_s if kind is Fault.PARTITION else 0.0),
        starts_s=[round(start, 2) for start in starts],
        cut_bytes=made.cut_bytes,
        resume_conflicts=mesh.resume_conflicts() if noisy else None,
        skipped_versions=summary.final_version - summary.steps if noisy else None,
        wrong=_wrong(mesh, summary, plan.steps),
    )


def _starts(mesh: MeshUnderFaults, killed: Sequence[float]) -> list[float]:
    """Seconds from each kill of the trainer until the next one has loaded the model and begins to catch up."""
    loaded = [datetime.fromisoformat(at).timestamp() for at in logged_at(mesh.folder.logs / "trainer.log", _LOADED)]
    return [min(at for at in loaded if at > kill) - kill for kill in killed]


_LOADED = "rows are packed"


def _wrong(mesh: MeshUnderFaults, summary: Summary, steps: int) -> list[str]:
    lines = read_metrics(mesh.folder.metrics)
    trained = sum(line.trajectories for line in lines)
    checks = {
        f"{summary.trajectories_published} published are not {summary.trajectories_trained} trained and "
        f"{summary.trajectories_dropped} dropped": summary.trajectories_published
        == summary.trajectories_trained + summary.trajectories_dropped,
        f"steps hold {trained} trajectories, the account {summary.trajectories_trained}": trained
        == summary.trajectories_trained,
        f"{len(lines)} steps in place of {steps}": [line.step for line in lines] == list(range(1, steps + 1)),
        f"a token of staleness {summary.max_staleness} over K = {summary.k}": summary.max_staleness <= summary.k,
        "engines serve other bytes than the trainer's": summary.weights_digest_match,
        "a version was refused at the bus": mesh.resume_conflicts() == 0,
    }
    return [what for what, holds in checks.items() if not holds]


def _table(bench: FaultsBench) -> Table:
    table = Table(title="Faults: the longest gap between steps after each, less the median gap")
    for column in ("fault", "median", "p95", "bar", "each", "balance"):
        table.add_column(column)
    for report in bench.faults:
        table.add_row(
            report.fault,
            f"{statistics.median(report.excess_s):.1f} s",
            f"{report.p95_s:.1f} s",
            f"≤ {report.bar_s:.0f} s",
            ", ".join(f"{excess:.1f}" for excess in report.excess_s),
            "; ".join(report.wrong) or "holds",
        )
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    table.caption = f"{bench.cores} cores, load before {load}; " + ", ".join(
        f"{name} {number}" for name, number in bench.versions.items()
    )
    return table


# What a fault costs: the longest gap between two optimizer steps after it, less the median gap of the run.
#
#     steps    │ │ │ │ │            │ │ │ │ │ │ │
#                      ▲ ◄── gap ──►
#                      fault                        the next fault, or the end
#
# A fault may show late (the trainer has batches left when their sources die), so all gaps up to the next fault count.
# The gap in which the next fault falls is the next one's alone.


def median_gap(steps: Sequence[float]) -> float:
    """Seconds between two steps, the median. `steps`: Unix seconds, in order. Raises ValueError for less than two."""
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps have no gap")
    return statistics.median(after - before for before, after in pairwise(steps))


def excesses(steps: Sequence[float], faults: Sequence[float]) -> list[float]:
    """Seconds that each fault added to the longest gap after it. `faults`: Unix seconds, in order.

    Raises ValueError for a fault that no step followed before the next one.
    """
    usual = median_gap(steps)
    ends = [*faults[1:], float("inf")]
    found = []
    for fault, end in zip(faults, ends, strict=True):
        gaps = [after - before for before, after in pairwise(steps) if fault < after <= end]
        if not gaps:
            raise ValueError(f"no step followed the fault at {fault:.3f}")
        found.append(max(gaps) - usual)
    return found
