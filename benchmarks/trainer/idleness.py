"""The share of time that the trainer waits for batches, and its throughput against a synchronous run.

Two meshes are alike but for K: `asynchronous` (K = 2) and `synchronous` (K = 0: the engines generate a batch, then the
trainer trains on it, in turn). Engines generate by the clock (`clock_engine`), so the trainer has its core to itself.

    quick    K = 0, engines in no hurry to be slow  ──► busy_s: what a step takes once its batch is there
    pace     token_s = stretch · busy_s / typical longest answer of a batch
    sync     K = 0 at that pace                     ──► trained tokens a second
    async    K = 2 at that pace                     ──► trained tokens a second, share of the time that was waited

The pace is set by the trainer's own, or the figures would be the machine's: the longest answer of a batch takes `stretch`
optimizer steps, K by default, as slow as answers may be whose first token is still to count when the last one is sampled.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.processes import LOOPBACK, PYTHON, cpu_s, free_port, running, running_redis
from benchmarks.trainer.report import Measured
from services.config.load import dump_settings
from services.config.settings import RolloutSettings, RunSettings, TrainerSettings, WeightSettings
from services.host.files import remove_shm_files
from services.host.run_folder import RunFolder
from services.supervisor.processes import Child
from services.wire.errors import RollmeshError
from services.wire.run_metrics import StepMetrics
from trainer.metrics.files import read_metrics

_START_WITHIN_S = 180.0
_STEP_WITHIN_S = 60.0
_POLL_S = 0.1
_TASK = "python:benchmarks.harness.clock_engine:Coin"


@dataclass(frozen=True, kw_only=True)
class PacedPlan:
    """`median`, `sigma`, `longest`: of the answers' lengths in tokens (log-normal). The fleet generates a batch at once."""

    groups_per_step: int
    group_size: int
    servers: int
    median: float
    sigma: float
    longest: int
    hidden_size: int
    layers: int
    seed: int

    @property
    def batch(self) -> int:
        """Trajectories that a step consumes."""
        return self.groups_per_step * self.group_size


@dataclass(frozen=True)
class PacedRun:
    """`lines`: the steps after the warm-up. `others_cpu`: cores that servers, bus, Redis and environment used meanwhile."""

    lines: list[StepMetrics]
    began: float
    """Unix seconds: the end of the last step of the warm-up."""
    others_cpu: float

    @property
    def wall_s(self) -> float:
        return self.lines[-1].time - self.began

    @property
    def idle(self) -> float:
        """Share of the wall time that the training thread waited for a batch."""
        return sum(line.wait_ms for line in self.lines) / 1e3 / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens that entered a loss, a second."""
        return sum(line.tokens for line in self.lines) / self.wall_s

    @property
    def masked_fraction(self) -> float:
        masked = sum(line.masked_tokens for line in self.lines)
        return masked / (masked + sum(line.tokens for line in self.lines))


async def make_policy(plan: PacedPlan, folder: Path) -> Path:
    """A random policy in `folder`. Raises RollmeshError."""
    sizes = [str(plan.hidden_size), str(plan.layers), str(plan.seed)]
    await _finished("policy", [*PYTHON, "benchmarks.harness.workload", str(folder / "model"), *sizes], folder)
    return folder / "model"


async def run_paced(
    plan: PacedPlan,
    *,
    k: int,
    token_s: float,
    steps: int,
    warm_up: int,
    model: Path,
    folder: Path,
    evaluation: Sequence[str] = ("--evaluation-problems", "1"),
    checkpoint_every: int = 1_000_000,
    trainer: Sequence[str] = (*PYTHON, "services", "train"),
    watch: Callable[[Child, RunFolder], Coroutine[None, None, None]] | None = None,
) -> PacedRun:
    """Train `warm_up` and then `steps` steps under K in a mesh of its own. Raises RollmeshError when a process fails.

    `evaluation`: flags of the environment. `trainer`: the command of its process, less the flags. `watch`: runs beside it.
    """
    run_id = folder.name
    run = await asyncio.to_thread(_prepare, folder, _settings(plan, k, warm_up + steps, checkpoint_every))
    common = ["--run-id", run_id, "--config", str(run.config)]
    try:
        async with AsyncExitStack() as stack:
            redis_url = await stack.enter_async_context(running_redis(folder))
            bus_port = free_port()
            mesh = [*common, "--redis-url", redis_url, "--bus-url", f"http://{LOOPBACK}:{bus_port}"]
            command = [*PYTHON, "services", "weight-bus", *common, "--port", str(bus_port)]
            others = [await stack.enter_async_context(running("bus", command, folder))]
            urls = []
            for number in range(plan.servers):
                port = free_port()
                urls.append(f"http://{LOOPBACK}:{port}")
                flags = [*mesh, "--model", str(model), "--server-id", f"s{number}", "--port", str(port)]
                command = [*PYTHON, "benchmarks.harness.clock_engine", *flags, *_pace(plan, token_s)]
                others.append(await stack.enter_async_context(running(f"server {number}", command, folder)))
            command = [
                *PYTHON,
                "services",
                "run-environment",
                "--run-id",
                run_id,
                *_playing(plan, k, run, urls),
                *evaluation,
            ]
            others.append(await stack.enter_async_context(running("environment", command, folder)))
            command = [*trainer, *mesh, "--model", str(model), "--run-dir", str(run.root)]
            training = await stack.enter_async_context(running("trainer", command, folder))
            if watch is not None:
                await stack.enter_async_context(_beside(watch(training, run)))
            await _until_steps(run, warm_up, training, others)
            began_cpu_s, began = _cpu_s(others), time.monotonic()
            await _until_steps(run, warm_up + steps, training, others)
            others_cpu = (_cpu_s(others) - began_cpu_s) / (time.monotonic() - began)
    finally:
        remove_shm_files(run_id)
    lines = read_metrics(run.metrics)
    return PacedRun(lines[warm_up:], lines[warm_up - 1].time, others_cpu)


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _prepare(folder: Path, settings: RunSettings) -> RunFolder:
    run = RunFolder(folder / "run")
    run.root.mkdir(parents=True)
    run.config.write_text(dump_settings(settings))
    return run


def _settings(plan: PacedPlan, k: int, steps: int, checkpoint_every: int) -> RunSettings:
    return RunSettings(
        task=_TASK,
        k=k,
        steps=steps,
        seed=plan.seed,
        rollout=RolloutSettings(
            groups_per_step=plan.groups_per_step, group_size=plan.group_size, max_tokens=plan.longest
        ),
        trainer=TrainerSettings(checkpoint_every=checkpoint_every),
        weights=WeightSettings(transport="shm"),
    )


def _pace(plan: PacedPlan, token_s: float) -> list[str]:
    flags = ["--median", str(plan.median), "--sigma", str(plan.sigma), "--longest", str(plan.longest)]
    return [*flags, "--token-s", str(token_s), "--places", str(plan.batch // plan.servers)]


def _playing(plan: PacedPlan, k: int, run: RunFolder, urls: Sequence[str]) -> list[str]:
    flags = ["--task", _TASK, "--run-dir", str(run.root), "--group-size", str(plan.group_size)]
    flags += ["--max-tokens", str(plan.longest), "--concurrency", str((k + 1) * plan.groups_per_step)]
    flags += ["--seed", str(plan.seed)]
    return [*flags, *(part for url in urls for part in ("--rollout-url", url))]


async def _until_steps(run: RunFolder, steps: int, trainer: Child, others: Sequence[Child]) -> None:
    made = 0
    while made < steps:
        try:
            async with asyncio.timeout(_STEP_WITHIN_S if made else _START_WITHIN_S):
                while len(read_metrics(run.metrics)) == made:
                    for child in (trainer, *others):
                        child.check()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise RollmeshError(f"step {made + 1} did not come", trainer.tail()) from error
        made = len(read_metrics(run.metrics))


def _cpu_s(children: Sequence[Child]) -> float:
    return sum(cpu_s(child) for child in children)


async def _finished(name: str, command: Sequence[str], folder: Path) -> None:
    async with running(name, command, folder) as child:
        if await child.process.wait():
            raise RollmeshError(f"{name} failed", child.tail())


K = 2
STRETCH = float(K)
STEPS, SYNC_STEPS = 30, 10
PLAN = PacedPlan(
    groups_per_step=8,
    group_size=8,
    servers=2,
    median=24.0,
    sigma=1.0,
    longest=512,
    hidden_size=256,
    layers=4,
    seed=1,
)
"""Answers of 40 tokens in the mean; one in forty is longer than 170, and the longest of a batch mostly than 200."""
_QUICK_TOKEN_S = 1e-4
_QUICK_STEPS, _QUICK_WARM_UP = 6, 3


@dataclass(frozen=True)
class Idleness:
    """`busy_s`: of a step, without waiting. `longest`: typical longest answer of a batch, tokens. `token_s`: the pace."""

    busy_s: float
    longest: float
    token_s: float
    asynchronous: PacedRun
    synchronous: PacedRun

    @property
    def idle_fraction(self) -> float:
        return self.asynchronous.idle

    @property
    def async_vs_sync(self) -> float:
        return self.asynchronous.tokens_per_s / self.synchronous.tokens_per_s


async def measure_rounds(rounds: int, seed: int, say: Callable[[str], None]) -> Measured:
    """`idle_fraction` and `async_vs_sync`, so many times, with what people may want to know of them.

    `say`: is told of each round. Raises RollmeshError when a process fails.
    """
    measured = []
    for number in range(1, rounds + 1):
        plan = replace(PLAN, seed=seed + number - 1)
        with tempfile.TemporaryDirectory(prefix="rollmesh-paced-") as folder:
            measured.append(
                await measure_idleness(plan, stretch=STRETCH, steps=STEPS, sync_steps=SYNC_STEPS, folder=Path(folder))
            )
        say(f"paced mesh, round {number} of {rounds}: {_describe(measured[-1])}")
    if not rounds:
        return Measured(missing=dict.fromkeys(("idle_fraction", "async_vs_sync"), "no paced rounds were asked for"))
    return Measured(
        rounds={
            "idle_fraction": [each.idle_fraction for each in measured],
            "async_vs_sync": [each.async_vs_sync for each in measured],
        },
        seen={f"paced mesh, round {number}": _describe(each) for number, each in enumerate(measured, start=1)},
    )


def _describe(measured: Idleness) -> str:
    of = [
        f"{name}: {run.tokens_per_s:.0f} tokens/s, {run.wall_s / len(run.lines):.2f} s a step, idle {run.idle:.1%}, "
        f"{run.masked_fraction:.1%} of the tokens over K, other processes on {run.others_cpu:.2f} cores"
        for name, run in ((f"K = {K}", measured.asynchronous), ("K = 0", measured.synchronous))
    ]
    pace = f"{measured.token_s * 1e3:.1f} ms a token, longest answer of a batch typically {measured.longest:.0f} tokens"
    return "; ".join([f"a step trains for {measured.busy_s:.2f} s; {pace}", *of])


async def measure_idleness(plan: PacedPlan, *, stretch: float, steps: int, sync_steps: int, folder: Path) -> Idleness:
    """Run the three meshes, one after the other. `folder`: for models, logs and runs; empty. Raises RollmeshError."""
    model = await make_policy(plan, folder)
    busy_s = await busy_seconds(plan, model, folder / "quick")
    longest = typical_longest(plan.median, plan.sigma, plan.longest, plan.batch)
    token_s = stretch * busy_s / longest
    synchronous = await run_paced(
        plan, k=0, token_s=token_s, steps=sync_steps, warm_up=2, model=model, folder=folder / "sync"
    )
    # The first K + 1 batches are sampled by the first version, before there is anything to train on.
    asynchronous = await run_paced(
        plan, k=K, token_s=token_s, steps=steps, warm_up=2 * (K + 1), model=model, folder=folder / "async"
    )
    return Idleness(busy_s, longest, token_s, asynchronous, synchronous)


async def busy_seconds(plan: PacedPlan, model: Path, folder: Path) -> float:
    """What a step takes without waiting, in a mesh whose engines are much faster. Raises RollmeshError."""
    quick = await run_paced(
        plan,
        k=0,
        token_s=_QUICK_TOKEN_S,
        steps=_QUICK_STEPS,
        warm_up=_QUICK_WARM_UP,
        model=model,
        folder=folder,
    )
    return statistics.median(line.step_ms - line.wait_ms for line in quick.lines) / 1e3


def typical_longest(median: float, sigma: float, cut: int, answers: int) -> float:
    """The median of the longest of so many log-normal lengths, those above `cut` sampled again."""
    normal = statistics.NormalDist()
    below = normal.cdf(math.log(cut / median) / sigma)
    return median * math.exp(sigma * normal.inv_cdf(below * 0.5 ** (1 / answers)))
