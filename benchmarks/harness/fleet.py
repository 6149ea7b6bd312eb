"""A fleet that is measured: rollout servers of one run and the gateway in front of them, each a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp

from benchmarks.harness.processes import cpu_s, own_cpu_s
from benchmarks.harness.servers import HttpArm, MeshPlan, running_gateway, running_server
from services.run_store.client import connect
from services.supervisor.processes import Child


@dataclass(frozen=True)
class Member:
    """A process that answers HTTP: how to speak to it, and it itself."""

    arm: HttpArm
    child: Child


class Fleet:
    """`servers`: those that run, by id. `gateway`: there once the fleet is up."""

    gateway: Member

    def __init__(self, plan: MeshPlan, http: aiohttp.ClientSession) -> None:
        self.servers: dict[str, Member] = {}
        self.plan = plan
        self._http = http
        self._stacks: dict[str, AsyncExitStack] = {}

    async def start(self, server_id: str) -> None:
        """Start a server and wait until it is ready. Raises RollmeshError when it does not come up."""
        stack = self._stacks[server_id] = AsyncExitStack()
        self.servers[server_id] = Member(
            *await stack.enter_async_context(running_server(self.plan, server_id, self._http))
        )

    async def start_gateway(self) -> None:
        """Start the gateway and wait until it is ready. Raises RollmeshError when it does not come up."""
        stack = self._stacks["gateway"] = AsyncExitStack()
        self.gateway = Member(*await stack.enter_async_context(running_gateway(self.plan, self._http)))

    async def kill(self, server_id: str) -> None:
        """kill -9, and gone."""
        child = self.servers.pop(server_id).child
        child.kill()
        await child.wait()
        await self._stacks.pop(server_id).aclose()

    async def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of all that a call through the gateway costs, this process's, the client's, too.

        An engine is a process that its server has started.
        """
        servers = [member.child for member in self.servers.values()]
        alone = sum(map(own_cpu_s, servers))
        async with connect(self.plan.redis_url) as redis:
            of_redis = await redis.info("cpu")
        return {
            "engines": sum(map(cpu_s, servers)) - alone,
            "servers": alone,
            "gateway": cpu_s(self.gateway.child),
            "redis": float(of_redis["used_cpu_user"] + of_redis["used_cpu_sys"]),
            "client": time.process_time(),
        }

    async def close(self) -> None:
        # The gateway, started last, first: it would look for servers that are on their way out.
        while self._stacks:
            _, stack = self._stacks.popitem()
            await stack.aclose()


@asynccontextmanager
async def running_fleet(plan: MeshPlan, count: int, http: aiohttp.ClientSession) -> AsyncIterator[Fleet]:
    """So many servers `s0`, `s1`, … and a gateway that knows them, for the time of the block."""
    fleet = Fleet(plan, http)
    try:
        # At once: each imports for seconds. All are waited for even if one fails, so that none comes up unowned.
        ends = await asyncio.gather(*(fleet.start(f"s{number}") for number in range(count)), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        await fleet.start_gateway()
        yield fleet
    finally:
        await fleet.close()
