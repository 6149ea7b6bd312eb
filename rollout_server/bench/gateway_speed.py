"""The same requests through the gateway, at its servers themselves and in bare engines: tokens a second, seconds alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from rollout_server.bench.bare_engine import BareEngine
from rollout_server.bench.fleet import Fleet
from rollout_server.bench.http_arm import Opened
from rollout_server.bench.rate import Rate, in_parallel
from rollout_server.bench.ratios import Speeds
from rollout_server.bench.rounds import Arms, SingleArms, in_rounds, one_at_a_time, warm_up
from rollout_server.bench.workload import Exchange

_Way = Literal["plain", "streamed"]


class GatewaySpeed:
    """`engines`: as many as the fleet has servers. `concurrency`: in flight in all.

    `gateway_cpu_s`: CPU seconds of the gateway's process in all counted rounds, by way; `http_cpu_s`: of the servers' event
    loops meanwhile.
    """

    def __init__(
        self, fleet: Fleet, engines: Sequence[BareEngine], exchanges: Sequence[Exchange], concurrency: int
    ) -> None:
        self.gateway_cpu_s: dict[str, float] = defaultdict(float)
        self.http_cpu_s: dict[str, float] = defaultdict(float)
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
        self.gateway_cpu_s.clear()
        self.http_cpu_s.clear()
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

        return await in_parallel(range(len(self._parts)), len(self._parts), load)

    async def _through_gateway(self, way: _Way) -> Rate:
        """All at the gateway, each in a session of its own; they are given up outside the clock and the count of CPU."""
        gateway = self._fleet.gateway
        gateway_before, http_before = gateway.child.cpu_s(), await self._http_cpu_s()
        rate, opened = await gateway.arm.as_agents(self._exchanges, self._concurrency, way)
        self.gateway_cpu_s[way] += gateway.child.cpu_s() - gateway_before
        self.http_cpu_s[way] += await self._http_cpu_s() - http_before
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

    async def _http_cpu_s(self) -> float:
        return sum([(await server.engine()).http_cpu_s for server in self._servers])
