"""Run folders for the dashboard's tests, as a run leaves them, and the dashboard itself on them."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from services.dashboard.app import make_dashboard_app
from services.dashboard.open_runs import OpenRuns
from services.dashboard.plan import DashboardPlan
from services.host.run_folder import RunFolder
from services.http.app import Stop
from services.security.permissions import NO_KEYS, Keys
from services.wire.run_metrics import EvaluationReport, StepMetrics
from tests.support.served_app import served
from tests.support.step_lines import step_metrics

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u202eesrever\x1b[2J\u200b"
)
"""A text that shows itself, or does what it says."""


def learning_step(step: int, steps: int, seed: int = 0, **changes: object) -> StepMetrics:
    """A step of a run that learns."""
    noise = random.Random(1000 * seed + step)
    success = min(1.0, 0.2 + 0.8 * (1 - math.exp(-4 * step / steps)) + noise.uniform(-0.04, 0.04))
    values = {
        "time": 1_795_000_000.0 + step,
        "success": success,
        "reward": success,
        "reward_spread": math.sqrt(max(0.0, success * (1 - success))),
        "response_length": 2 + 10 * success,
        "entropy": 1.2 * (1 - success) + 0.01,
        "tokens": 1500,
        "tokens_per_s": 9000 + noise.uniform(-3000, 3000),
        "staleness_mean": 1.0 + noise.uniform(-0.5, 0.5),
        "staleness_max": 2,
        "equal_groups": success * 0.8,
        "truncated": 0.01,
        "grad_norm": 0.5,
        "loss": 0.01,
        "kl": 0.0003,
        "commit_ms": 12.5,
        "stage_ms": 5.0,
        "flip_ms": 0.2,
        "memory_bytes": 480 << 20,
        "learning_rate": 0.0005,
        "effective_samples": 0.98,
        "update_version": step,
        "update_state": "committed",
    }
    return step_metrics(step, **{**values, **changes})


def make_run(
    root: Path, name: str, *, steps: int = 60, seed: int = 1, settings: str = "k = 2\n", done: bool = True
) -> RunFolder:
    """A run folder with metrics and, where it is done, a summary."""
    folder = RunFolder(root / name)
    folder.root.mkdir(parents=True)
    top = f'task = "running-sums"\nengine = "torch"\nservers = 2\nsteps = {steps}\nseed = {seed}\n'
    folder.config.write_text(top + settings)
    folder.run_id.write_text(f"id-of-{name}\n")
    folder.lock.touch()
    with folder.metrics.open("wb") as file:
        for step in range(1, steps + 1):
            file.write(msgspec.json.encode(learning_step(step, steps, seed)) + b"\n")
    if done:
        solved = ([1] * 8 + [0] * 24, [1] * 30 + [0] * 2)
        folder.evaluation.write_bytes(msgspec.json.encode(EvaluationReport(0.25, 0.94, 3.0, 9.0, 32, *solved)))
        folder.summary.write_text("{}")
    return folder


@asynccontextmanager
async def dashboard(runs: OpenRuns, keys: Keys = NO_KEYS) -> AsyncIterator[str]:
    """Its address, without a slash at the end."""
    stop = Stop()
    async with served(make_dashboard_app(DashboardPlan(runs=runs, keys=keys), stop), stop) as url:
        yield url
