"""`./dev bench telemetry`: what figures and traces cost a rollout server's throughput.

    this process: the client ──HTTP──► server, traces and JSON logs switched on
        `off`      calls of a trace that is recorded nowhere        `control`  the same once more: the noise
        `scraped`  … and /metrics read every second                `traced`   every call recorded ──OTLP──► a sink
        `all`      both

All arms are of one process, in rounds of random order: two processes of the same program differ by several percent in
speed for their whole life, which would hide what is looked for. For the same reason several servers are measured, one
after the other. Every request is a chat completion in a session that its agent opens just before: two calls, and where
they are recorded three spans. Costs are of an arm beside `off` in the same round. Figures are kept in all arms: there is
no switch to keep none, and nothing is counted by token. The server writes no line for a call that goes well: JSON costs
nothing there.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import aiohttp
import typer

from benchmarks.harness.command import Say, check_hidden_size, run_measurement, show
from benchmarks.harness.processes import LOOPBACK, PYTHON, cpu_s, free_port, running, running_redis, versions
from benchmarks.harness.servers import HttpArm, client, plan_mesh, running_server
from benchmarks.harness.timing import Arms, Rate, Speeds, by_round, in_parallel, in_rounds, warm_up
from benchmarks.harness.workload import Exchange, make_workload, save_random_policy
from benchmarks.telemetry.report import (
    ARMS,
    BASE,
    SCRAPE_EVERY_S,
    AloneFigures,
    Arm,
    TelemetryBench,
    costs,
    share_alone,
)
from services.observability.tracing import TRACEPARENT
from services.supervisor.processes import Child

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: ./dev bench telemetry --servers 3 --json")
def telemetry(
    servers: Annotated[int, typer.Option(min=1, help="Servers, one after the other")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm a server, interleaved")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests a run")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 64,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    alone: Annotated[int, typer.Option(min=1, help="Sessions a round where telemetry is seen alone")] = 400,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """What figures and traces cost a rollout server: calls with each beside calls without."""
    check_hidden_size(hidden_size)

    from benchmarks.telemetry.report import as_table
    from services.config.traces import TraceSettings
    from services.observability.setup import check_installed

    check_installed(TraceSettings(traces="otlp"))
    shape = TelemetryShape(
        servers=servers,
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        layers=layers,
        alone=alone,
    )
    bench = run_measurement(lambda scratch, say: measure_telemetry(shape, scratch, say))
    show(bench, as_json, as_table(bench))


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
    environ = {
        "ROLLMESH_LOG_JSON": "1",
        "ROLLMESH_TRACES": "otlp",
        "ROLLMESH_TRACES_ENDPOINT": sink,
        "ROLLMESH_TRACES_RATIO": "1",
    }
    async with client() as recorded, client() as unrecorded:
        ids = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}"
        recorded.headers[TRACEPARENT], unrecorded.headers[TRACEPARENT] = f"{ids}-01", f"{ids}-00"
        async with running_server(plan, "s0", unrecorded, environ) as (calls, child):
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
        before = cpu_s(server.child)
        rate, opened = await calls.as_agents(exchanges, concurrency, "plain")
        used_s = cpu_s(server.child) - before
    await server.calls.give_up(opened)
    return rate, used_s


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
    async with running("trace sink", [*PYTHON, "benchmarks.telemetry.run", str(port)], folder):
        yield f"http://{LOOPBACK}:{port}/v1/traces"


# Telemetry is measured alone, by calls that generate no token: a call that generates tokens costs a hundred times what
# telemetry adds to it, and varies between runs by more than that.
# Of a session that is opened and aborted.
_SPANS_A_PAIR = 2
_AT_ONCE = 8
_ROUNDS = 6
# Spans are handed in a second after they were made, in batches: whatever is left of them belongs to their own round.
_HANDED_IN_S = 1.5
_Kind = Literal["plain", "recorded"]


async def measure_alone(
    plain: HttpArm, recorded: HttpArm, child: Child, count: int, rng: random.Random
) -> AloneFigures:
    """`count`: sessions, and scrapes, a round. `recorded`: the server by a client whose calls are of a recorded trace."""
    found = AloneFigures()
    arms: dict[_Kind, HttpArm] = {"plain": plain, "recorded": recorded}
    await _pairs(recorded, child, count)
    for _ in range(_ROUNDS):
        order = list(arms)
        rng.shuffle(order)
        spent = {kind: await _pairs(arms[kind], child, count) for kind in order}
        # What a server does by itself in that time is in both.
        found.span_us.append(1e6 * (spent["recorded"] - spent["plain"]) / (_SPANS_A_PAIR * count))
        found.scrape_ms.append(1e3 * await _scrapes(plain, child, count) / count)
    return found


async def _pairs(arm: HttpArm, child: Child, count: int) -> float:
    """CPU seconds of so many sessions that are opened and aborted."""

    async def play(_: int) -> int:
        await arm.give_up([await arm.open_one()])
        return 0

    before = cpu_s(child)
    await in_parallel(range(count), _AT_ONCE, play)
    await asyncio.sleep(_HANDED_IN_S)
    return cpu_s(child) - before


async def _scrapes(arm: HttpArm, child: Child, count: int) -> float:
    """CPU seconds of so many calls of `/metrics`, one after the other."""
    before = cpu_s(child)
    for _ in range(count):
        await arm.scrape()
    return cpu_s(child) - before


# A collector that discards spans: `python -m benchmarks.telemetry.run PORT`. It shares the machine's cores, so it parses
# only the length of a call.

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"


async def _take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(_ANSWER)
            await writer.drain()
    writer.close()


async def _serve(port: int) -> None:
    async with await asyncio.start_server(_take, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(sys.argv[1])))
