"""Run folders for the dashboard's tests, as a run leaves them, and the dashboard itself on them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from fastapi import FastAPI

from services.dashboard.app import make_dashboard_app
from services.dashboard.open_runs import OpenRun, OpenRuns
from services.dashboard.plan import DashboardPlan
from services.host.devices import Device
from services.host.run_folder import RunFolder
from services.http.app import Stop, make_app
from services.policies.placement.place import Place, Placement
from services.run_store.client import connect
from services.run_store.discovery import ServerRecord, ServiceKind, ServiceRecord, ServiceRegistry
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.status import TrainerStatus, WaitBoard, post_trainer_status
from services.security.permissions import NO_KEYS, Keys
from services.wire.rollout_api import EngineReport
from services.wire.run_metrics import EvaluationReport, StepMetrics
from services.wire.weights_api import EngineProgress, UpdateView, VersionsView, VersionView
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


def placed() -> Placement:
    """The trainer and two engines, each on a GPU of its own; one GPU is left."""
    devices = [Device(str(number), 80 << 30) for number in range(4)]
    names = ("trainer", "rollout-server-0", "rollout-server-1")
    places = [
        Place(name=name, devices=[device], nbytes=52 << 30, words="weights and cache")
        for name, device in zip(names, devices, strict=False)
    ]
    return Placement(places=places, unused=devices[3:])


class LiveRun:
    """A run that runs: its folder, its account and trainer's status in Redis, and services that a test serves."""

    def __init__(self, redis_url: str, run_id: str, root: Path, *, step: int = 34, steps: int = 60) -> None:
        self.redis_url, self.run_id, self.step, self.steps = redis_url, run_id, step, steps
        self.folder = make_run(root, "live", steps=step, done=False)
        self.folder.config.write_text(self.folder.config.read_text().replace(f"steps = {step}\n", f"steps = {steps}\n"))
        self.folder.placement.write_bytes(msgspec.json.encode(placed()))
        self.runs = OpenRuns((), None, OpenRun("live", run_id, self.folder, redis_url, told=True))

    async def begin(self) -> None:
        """Nothing is open yet, and the trainer has told of its last step."""
        redis = connect(self.redis_url)
        try:
            await Ledger(redis, self.run_id).begin(0)
            line = learning_step(self.step, self.steps)
            status = TrainerStatus(
                step=self.step, steps=self.steps, k=2, at=line.time, busy_share=0.62, over_steps=20,
                tokens_per_s=line.tokens_per_s, staleness_mean=line.staleness_mean, staleness_max=2,
                staleness_histogram={"0": 400, "1": 700, "2": 400}, masked_fraction=0.0, effective_samples=0.98,
                dropped={"late": 3},
            )  # fmt: skip
            await post_trainer_status(redis, self.run_id, status)
        finally:
            await redis.aclose()

    async def announce(self, name: str, url: str, kind: ServiceKind = "rollout-server", **told: Any) -> None:
        """A service is here, for a minute."""
        redis = connect(self.redis_url)
        values = {"name": name, "url": url, "lease_s": 60.0, "incarnation": "life", **told}
        if kind == "rollout-server":
            version = self.step - 1
            values = {"state": "serving", "model": "m", "policy_version": version, "max_running": 8, **values}
            record: ServiceRecord = ServerRecord(**values)
        else:
            record = ServiceRecord(kind=kind, **values)
        try:
            await ServiceRegistry(redis, self.run_id).announce([record])
        finally:
            await redis.aclose()

    async def hold_up(self, server: str, group: str = "g-17", *, finished: int = 5) -> None:
        """The trainer waits, and one group is open at a server."""
        redis, keys = connect(self.redis_url), RunKeys(self.run_id)
        try:
            opened = msgspec.json.encode([17, server, time.time() - 8.0])
            await redis.hset(keys.open_groups, mapping={group: opened})
            await redis.hset(keys.owners, mapping={group: f"{server}/life"})
            await redis.hset(keys.published_groups, group, finished)
            await WaitBoard(redis, self.run_id, "trainer").post("the batch of step 35: 15 of 16 groups are complete")
        finally:
            await redis.aclose()


def engine_app(name: str, version: int) -> FastAPI:
    """A rollout server as the dashboard sees it."""
    app = make_app(name, "0", nothing, list)

    @app.get("/engine")
    async def engine() -> EngineReport:
        return EngineReport(
            server_id=name, name="torch", policy_version=version, running=3, waiting=1, paused=False,
            tokens_generated=50_000, prefill_tokens=9_000, commits=version, stalls_ms=[4.0, 6.5], open_groups=1,
            admission_waiting=2, http_cpu_s=1.0,
        )  # fmt: skip

    return app


def bus_app(newest: int, engines: tuple[str, ...] = ("s0", "s1")) -> FastAPI:
    """A weight bus as the dashboard sees it."""
    app = make_app("weight-bus", "0", nothing, list)
    known = range(newest, max(0, newest - 8), -1)

    @app.get("/v1/versions")
    async def versions() -> VersionsView:
        views = [
            VersionView(
                version=each, state="committed", root_digest="d" * 64, kind="delta", base_version=each - 1,
                nbytes=460_544, served_by=list(engines) if each == newest else [],
            )
            for each in known
        ]  # fmt: skip
        return VersionsView(latest=newest, versions=views, newest=newest)

    @app.get("/v1/updates/{version}")
    async def update(version: int) -> UpdateView:
        progress = [
            EngineProgress(
                engine_id=each, state="committed", bytes_read=460_544, stage_ms=6.0 + version % 5 + 3 * place,
                flip_ms=0.2 + place, attempts=1,
            )
            for place, each in enumerate(engines)
        ]  # fmt: skip
        return UpdateView(
            version=version, state="committed", root_digest="d" * 64, engines=progress, publish_to_commit_ms=24.5
        )

    return app


@asynccontextmanager
async def live_mesh(run: LiveRun) -> AsyncIterator[dict[str, str]]:
    """The run with two engines, a bus, a gateway and a trainer that answer; name → address."""
    version = run.step - 1
    plain = {"gateway": "gateway", "trainer": "trainer"}
    async with AsyncExitStack() as stack:
        await run.begin()
        urls = {}
        for place, name in enumerate(("s0", "s1")):
            urls[name] = await stack.enter_async_context(served(engine_app(name, version)))
            told = {
                "running": 3 + 2 * place,
                "waiting": place,
                "open_sessions": 24,
                "store_used": 70 << 20,
                "kv_use": 0.375,
            }
            await run.announce(name, urls[name], **told, store_most=768 << 20)
        urls["weight-bus"] = await stack.enter_async_context(served(bus_app(version)))
        await run.announce("weight-bus", urls["weight-bus"], "weight-bus")
        for name, kind in plain.items():
            urls[name] = await stack.enter_async_context(served(make_app(name, "0", nothing, list)))
            await run.announce(name, urls[name], cast(ServiceKind, kind))
        yield urls


@asynccontextmanager
async def nothing(_: FastAPI) -> AsyncIterator[None]:
    """The lifespan of an application that owns nothing."""
    yield


@asynccontextmanager
async def dashboard(runs: OpenRuns, keys: Keys = NO_KEYS) -> AsyncIterator[str]:
    """Its address, without a slash at the end."""
    stop = Stop()
    async with served(make_dashboard_app(DashboardPlan(runs=runs, keys=keys), stop), stop) as url:
        yield url
