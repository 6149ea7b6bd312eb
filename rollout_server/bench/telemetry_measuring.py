"""The arms of `rollmesh bench telemetry`: the same server again and again, each with another part of it switched on."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rollout_server.bench.http_arm import HttpArm, client
from rollout_server.bench.policy import save_random_policy
from rollout_server.bench.rate import Rate
from rollout_server.bench.ratios import Speeds, by_round
from rollout_server.bench.rounds import Arms, in_rounds, warm_up
from rollout_server.bench.servers import plan_mesh, running_server
from rollout_server.bench.telemetry_report import BASE, Arm, TelemetryBench, costs
from rollout_server.bench.workload import Exchange, make_workload
from services.bench.processes import LOOPBACK, PYTHON, Child, free_port, running, running_redis
from services.bench.versions import versions
from services.tracing import TRACEPARENT

Say = Callable[[str], None]
_SEED = 1
_SCRAPE_EVERY_S = 1.0
_QUIET = {"ROLLMESH_TRACES": "off", "ROLLMESH_LOG_JSON": "0"}


@dataclass(frozen=True, kw_only=True)
class TelemetryShape:
    """What the command line asks for. `arms`: the one without telemetry first."""

    arms: tuple[Arm, ...]
    rounds: int
    requests: int
    concurrency: int
    max_tokens: int
    hidden_size: int
    layers: int


@dataclass(frozen=True)
class _Server:
    """One arm: a server, the process it is, and the client that speaks to it."""

    calls: HttpArm
    child: Child
    http: aiohttp.ClientSession
    metrics_url: str | None


async def measure_telemetry(shape: TelemetryShape, folder: Path, say: Say) -> TelemetryBench:
    """Run the whole benchmark; all files in `folder`. Raises RollmeshError when an arm fails."""
    load_before = os.getloadavg()
    model = folder / "policy"
    parameters = save_random_policy(model, hidden_size=shape.hidden_size, layers=shape.layers, seed=_SEED)
    exchanges = make_workload(model, count=shape.requests, max_tokens=shape.max_tokens, seed=_SEED)
    cpu_ms: dict[str, list[float]] = {arm: [] for arm in shape.arms}
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(running_redis(folder))
        sink = await stack.enter_async_context(_running_sink(folder))
        servers: dict[Arm, _Server] = {}
        for arm in shape.arms:
            say(f"starting the server of arm {arm}")
            servers[arm] = await _start(stack, arm, sink, redis_url, model, shape, folder)

        def load(arm: Arm) -> Callable[[], Awaitable[Rate]]:
            async def run() -> Rate:
                rate, cpu_s = await _run(servers[arm], exchanges, shape.concurrency)
                cpu_ms[arm].append(round(1e3 * cpu_s / len(exchanges), 3))
                return rate

            return run

        arms: Arms = {arm: load(arm) for arm in shape.arms}
        await warm_up(arms)
        for figures in cpu_ms.values():
            figures.clear()

        def tell(number: int, speeds: Speeds) -> None:
            last = {arm: by_round(speeds, arm, BASE)[-1] for arm in shape.arms if arm != BASE}
            say(f"round {number}: " + ", ".join(f"{arm} {ratio:.3f}" for arm, ratio in last.items()))

        speeds = await in_rounds(arms, shape.rounds, random.Random(_SEED), tell)
    return TelemetryBench(
        cost_percent=costs(speeds, cpu_ms),
        tokens_per_s={arm: [round(figure, 1) for figure in figures] for arm, figures in speeds.items()},
        cpu_ms_per_call=cpu_ms,
        requests=shape.requests,
        concurrency=shape.concurrency,
        max_tokens=shape.max_tokens,
        parameters=parameters,
        load_before=load_before,
        cores=os.cpu_count() or 1,
        versions=versions("rollmesh", "torch", "opentelemetry-sdk", "structlog", "prometheus-client", "uvicorn"),
    )


async def _start(
    stack: AsyncExitStack, arm: Arm, sink: str, redis_url: str, model: Path, shape: TelemetryShape, folder: Path
) -> _Server:
    """A server in a run of its own."""
    http = await stack.enter_async_context(client())
    if arm in ("traced", "all"):
        # As a runner that is traced speaks: every call says which trace it belongs to.
        http.headers[TRACEPARENT] = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    plan = await plan_mesh(
        arm.replace("_", "-"),
        redis_url=redis_url,
        model=model,
        engine="torch",
        max_running=shape.concurrency,
        folder=folder,
    )
    started = running_server(plan, "s0", http, _surroundings(arm, sink))
    calls, child = await stack.enter_async_context(started)
    return _Server(calls, child, http, f"{calls.url}/metrics" if arm in ("scraped", "all") else None)


def _surroundings(arm: Arm, sink: str) -> Mapping[str, str]:
    found = dict(_QUIET)
    if arm in ("json_logs", "all"):
        found["ROLLMESH_LOG_JSON"] = "1"
    if arm in ("traced", "all"):
        found |= {"ROLLMESH_TRACES": "otlp", "ROLLMESH_TRACES_ENDPOINT": sink, "ROLLMESH_TRACES_RATIO": "1"}
    return found


async def _run(server: _Server, exchanges: list[Exchange], concurrency: int) -> tuple[Rate, float]:
    """As agents do, each opening a session and asking in it; and the CPU seconds that it cost the server."""
    async with _scraping(server):
        before = server.child.cpu_s()
        rate, opened = await server.calls.as_agents(exchanges, concurrency, "plain")
        cpu_s = server.child.cpu_s() - before
    await server.calls.give_up(opened)
    return rate, cpu_s


@asynccontextmanager
async def _scraping(server: _Server) -> AsyncIterator[None]:
    if server.metrics_url is None:
        yield
        return
    task = asyncio.create_task(_scrape(server.http, server.metrics_url), name="scraping")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _scrape(http: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with http.get(url) as answer:
            await answer.read()
        await asyncio.sleep(_SCRAPE_EVERY_S)


@asynccontextmanager
async def _running_sink(folder: Path) -> AsyncIterator[str]:
    port = free_port()
    async with running("trace sink", [*PYTHON, "rollout_server.bench.trace_sink", str(port)], folder):
        yield f"http://{LOOPBACK}:{port}/v1/traces"
