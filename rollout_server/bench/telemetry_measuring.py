"""The arms of `rollmesh bench telemetry`, all of one server: what differs is what its callers ask of its telemetry."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp

from rollout_server.bench.http_arm import HttpArm, client
from rollout_server.bench.policy import save_random_policy
from rollout_server.bench.rate import Rate
from rollout_server.bench.ratios import Speeds, by_round
from rollout_server.bench.rounds import Arms, in_rounds, warm_up
from rollout_server.bench.servers import plan_mesh, running_server
from rollout_server.bench.telemetry_alone import measure_alone
from rollout_server.bench.telemetry_report import (
    ARMS,
    BASE,
    SCRAPE_EVERY_S,
    AloneFigures,
    Arm,
    TelemetryBench,
    costs,
    share_alone,
)
from rollout_server.bench.workload import Exchange, make_workload
from services.bench.processes import LOOPBACK, PYTHON, Child, free_port, running, running_redis
from services.bench.versions import versions
from services.tracing import TRACEPARENT

Say = Callable[[str], None]
_SEED = 1
_SCRAPED: tuple[Arm, ...] = ("scraped", "all")
_TRACED: tuple[Arm, ...] = ("traced", "all")


@dataclass(frozen=True, kw_only=True)
class TelemetryShape:
    """What the command line asks for. `servers`: one after the other, each with so many `rounds`.

    `alone`: sessions a round of `measure_alone`.
    """

    servers: int
    rounds: int
    requests: int
    concurrency: int
    max_tokens: int
    hidden_size: int
    layers: int
    alone: int


async def measure_telemetry(shape: TelemetryShape, folder: Path, say: Say) -> TelemetryBench:
    """Run the whole benchmark; all files in `folder`. Raises RollmeshError when a server fails."""
    load_before = os.getloadavg()
    model = folder / "policy"
    parameters = save_random_policy(model, hidden_size=shape.hidden_size, layers=shape.layers, seed=_SEED)
    exchanges = make_workload(model, count=shape.requests, max_tokens=shape.max_tokens, seed=_SEED)
    speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
    alone, rng = AloneFigures(), random.Random(_SEED)
    async with AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(running_redis(folder))
        sink = await stack.enter_async_context(_running_sink(folder))
        for number in range(shape.servers):
            say(f"starting server {number + 1} of {shape.servers}")
            async with _serving(f"server-{number}", sink, redis_url, model, shape, folder) as server:
                found, cpu = await _measure(server, exchanges, shape, rng, say)
                plain, recorded = (server.calls.through(http) for http in (server.unrecorded, server.recorded))
                each = await measure_alone(plain, recorded, server.child, shape.alone, rng)
                say(f"alone: {median(each.span_us):.0f} µs a span, {median(each.scrape_ms):.2f} ms a scrape")
            alone.span_us += each.span_us
            alone.scrape_ms += each.scrape_ms
            for arm in ARMS:
                speeds[arm] += found[arm]
                cpu_ms[arm] += cpu[arm]
    return TelemetryBench(
        cost_percent=costs(speeds, cpu_ms),
        alone=share_alone(
            alone,
            cpu_ms_per_call=median(cpu_ms[BASE]),
            calls_per_s=median(speeds[BASE]) * len(exchanges) / sum(exchange.max_tokens for exchange in exchanges),
        ),
        tokens_per_s={arm: [round(figure, 1) for figure in figures] for arm, figures in speeds.items()},
        cpu_ms_per_call=cpu_ms,
        servers=shape.servers,
        requests=shape.requests,
        concurrency=shape.concurrency,
        max_tokens=shape.max_tokens,
        parameters=parameters,
        load_before=load_before,
        cores=os.cpu_count() or 1,
        versions=versions("rollmesh", "torch", "opentelemetry-sdk", "structlog", "prometheus-client", "uvicorn"),
    )


@dataclass(frozen=True)
class _Server:
    """`recorded`, `unrecorded`: clients whose calls say that they are of a trace which is recorded, or is not."""

    calls: HttpArm
    child: Child
    recorded: aiohttp.ClientSession
    unrecorded: aiohttp.ClientSession


@asynccontextmanager
async def _serving(
    name: str, sink: str, redis_url: str, model: Path, shape: TelemetryShape, folder: Path
) -> AsyncIterator[_Server]:
    """A server in a run of its own, with traces and JSON logs switched on."""
    plan = await plan_mesh(
        name, redis_url=redis_url, model=model, engine="torch", max_running=shape.concurrency, folder=folder
    )
    surroundings = {
        "ROLLMESH_LOG_JSON": "1",
        "ROLLMESH_TRACES": "otlp",
        "ROLLMESH_TRACES_ENDPOINT": sink,
        "ROLLMESH_TRACES_RATIO": "1",
    }
    async with client() as recorded, client() as unrecorded:
        ids = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}"
        recorded.headers[TRACEPARENT], unrecorded.headers[TRACEPARENT] = f"{ids}-01", f"{ids}-00"
        async with running_server(plan, "s0", unrecorded, surroundings) as (calls, child):
            yield _Server(calls, child, recorded, unrecorded)


async def _measure(
    server: _Server, exchanges: list[Exchange], shape: TelemetryShape, rng: random.Random, say: Say
) -> tuple[Speeds, dict[str, list[float]]]:
    """Tokens a second, and CPU milliseconds a call, by arm and round."""
    cpu_ms: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def load(arm: Arm) -> Callable[[], Awaitable[Rate]]:
        async def run() -> Rate:
            rate, cpu_s = await _run(server, arm, exchanges, shape.concurrency)
            cpu_ms[arm].append(round(1e3 * cpu_s / len(exchanges), 3))
            return rate

        return run

    def tell(number: int, speeds: Speeds) -> None:
        last = {arm: by_round(speeds, arm, BASE)[-1] for arm in ARMS if arm != BASE}
        say(f"round {number}: " + ", ".join(f"{arm} {ratio:.3f}" for arm, ratio in last.items()))

    arms: Arms = {arm: load(arm) for arm in ARMS}
    await warm_up(arms)
    for figures in cpu_ms.values():
        figures.clear()
    return await in_rounds(arms, shape.rounds, rng, tell), cpu_ms


async def _run(server: _Server, arm: Arm, exchanges: list[Exchange], concurrency: int) -> tuple[Rate, float]:
    """As agents do, each opening a session and asking in it; and the CPU seconds that it cost the server."""
    calls = server.calls.through(server.recorded if arm in _TRACED else server.unrecorded)
    async with _scraping(server, arm):
        before = server.child.cpu_s()
        rate, opened = await calls.as_agents(exchanges, concurrency, "plain")
        cpu_s = server.child.cpu_s() - before
    await server.calls.give_up(opened)
    return rate, cpu_s


@asynccontextmanager
async def _scraping(server: _Server, arm: Arm) -> AsyncIterator[None]:
    if arm not in _SCRAPED:
        yield
        return
    task = asyncio.create_task(_scrape(server.calls.through(server.unrecorded)), name="scraping")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _scrape(server: HttpArm) -> None:
    while True:
        await server.scrape()
        await asyncio.sleep(SCRAPE_EVERY_S)


@asynccontextmanager
async def _running_sink(folder: Path) -> AsyncIterator[str]:
    port = free_port()
    async with running("trace sink", [*PYTHON, "rollout_server.bench.trace_sink", str(port)], folder):
        yield f"http://{LOOPBACK}:{port}/v1/traces"
