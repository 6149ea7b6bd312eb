"""One run of a mesh whose engines draw by the clock: every process real, started by command, judged by its metrics.

policy folder ─► Valkey ─► weight bus ─► paced rollout servers ─► environment, trainer ─► metrics.jsonl
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from services.bench.processes import LOOPBACK, PYTHON, Child, free_port, running, running_redis
from services.config_file import dump_settings
from services.run_folder import RunFolder
from services.settings import RolloutSettings, RunSettings, TrainerSettings, WeightSettings
from services.shared_memory import remove_shm_files
from services.wire.errors import RollmeshError
from trainer.metrics import StepMetrics
from trainer.run_records import read_metrics

_START_WITHIN_S = 180.0
_STEP_WITHIN_S = 60.0
_POLL_S = 0.1
_TASK = "python:clients.bench.coin:Coin"


@dataclass(frozen=True, kw_only=True)
class PacedPlan:
    """`median`, `sigma`, `longest`: of the answers' lengths in tokens (log-normal). The fleet draws one batch at once."""

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
    await _finished("policy", [*PYTHON, "rollout_server.bench.policy", str(folder / "model"), *sizes], folder)
    return folder / "model"


async def run_paced(
    plan: PacedPlan, *, k: int, token_s: float, steps: int, warm_up: int, model: Path, folder: Path
) -> PacedRun:
    """Train `warm_up` and then `steps` steps under K in a mesh of its own. Raises RollmeshError when a process fails."""
    run_id = folder.name
    run = await asyncio.to_thread(_prepare, folder, _settings(plan, k, warm_up + steps))
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
                command = [*PYTHON, "rollout_server.bench.paced_server", *flags, *_pace(plan, token_s)]
                others.append(await stack.enter_async_context(running(f"server {number}", command, folder)))
            command = [*PYTHON, "services", "run-environment", "--run-id", run_id, *_playing(plan, k, run, urls)]
            others.append(await stack.enter_async_context(running("environment", command, folder)))
            command = [*PYTHON, "services", "train", *mesh, "--model", str(model), "--run-dir", str(run.root)]
            trainer = await stack.enter_async_context(running("trainer", command, folder))
            await _until_steps(run, warm_up, trainer, others)
            began_cpu_s, began = _cpu_s(others), time.monotonic()
            await _until_steps(run, warm_up + steps, trainer, others)
            others_cpu = (_cpu_s(others) - began_cpu_s) / (time.monotonic() - began)
    finally:
        remove_shm_files(run_id)
    lines = read_metrics(run.metrics)
    return PacedRun(lines[warm_up:], lines[warm_up - 1].time, others_cpu)


def _prepare(folder: Path, settings: RunSettings) -> RunFolder:
    run = RunFolder(folder / "run")
    run.root.mkdir(parents=True)
    run.config.write_text(dump_settings(settings))
    return run


def _settings(plan: PacedPlan, k: int, steps: int) -> RunSettings:
    return RunSettings(
        task=_TASK,
        k=k,
        steps=steps,
        seed=plan.seed,
        rollout=RolloutSettings(
            groups_per_step=plan.groups_per_step, group_size=plan.group_size, max_tokens=plan.longest
        ),
        trainer=TrainerSettings(checkpoint_every=1_000_000),
        weights=WeightSettings(transport="shm"),
    )


def _pace(plan: PacedPlan, token_s: float) -> list[str]:
    flags = ["--median", str(plan.median), "--sigma", str(plan.sigma), "--longest", str(plan.longest)]
    return [*flags, "--token-s", str(token_s), "--places", str(plan.batch // plan.servers)]


def _playing(plan: PacedPlan, k: int, run: RunFolder, urls: Sequence[str]) -> list[str]:
    flags = ["--task", _TASK, "--run-dir", str(run.root), "--group-size", str(plan.group_size)]
    flags += ["--max-tokens", str(plan.longest), "--concurrency", str((k + 1) * plan.groups_per_step)]
    flags += ["--evaluation-problems", "1", "--seed", str(plan.seed)]
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
    return sum(child.cpu_s() for child in children)


async def _finished(name: str, command: Sequence[str], folder: Path) -> None:
    async with running(name, command, folder) as child:
        if await child.process.wait():
            raise RollmeshError(f"{name} failed", child.tail())
