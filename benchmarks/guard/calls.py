"""What agents' own calls cost: CPU milliseconds of each service, and of the client, a call through the gateway.

    session opened ──► chat completion, whole or streamed ──► session given up         one call

The environment runner of a mesh (`benchmarks.guard.mesh_run`) takes turns of whole groups in few requests. An agent of the
user's makes these calls, whose way through gateway and rollout server is another one. A fleet of each checkout stands for
the whole comparison, so that a pair costs seconds. A decode step of the random model takes longer than chunks are gathered
for, so that a stream is written token by token, as with any model of use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.harness.processes import running_redis
from benchmarks.harness.revision import Checkout
from benchmarks.harness.servers import Way, plan_mesh
from benchmarks.harness.workload import Exchange, make_workload, save_random_policy

CALL, STREAMED = "cpu_ms_per_call.", "cpu_ms_per_streamed_call."
_WAYS: tuple[tuple[str, Way], ...] = ((CALL, "plain"), (STREAMED, "streamed"))
_CALLS, _TOKENS, _AT_ONCE = 64, 16, 8
_SEED = 1


class AgentCalls:
    """The calls, and the fleet that answers them."""

    def __init__(self, fleet: Fleet, exchanges: list[Exchange]) -> None:
        self._fleet = fleet
        self._exchanges = exchanges

    async def figures(self) -> dict[str, float]:
        """CPU milliseconds a call, by service. Raises RollmeshError for a call that fails."""
        figures: dict[str, float] = {}
        gateway = self._fleet.gateway.arm
        for prefix, way in _WAYS:
            before = await self._fleet.cpu_s()
            _, opened = await gateway.as_agents(self._exchanges, _AT_ONCE, way)
            await gateway.give_up(opened)
            after = await self._fleet.cpu_s()
            for who in sorted(after.keys() - {"engines"}):
                figures[prefix + who] = 1e3 * (after[who] - before[who]) / len(self._exchanges)
        return figures


def make_calls(model: Path) -> list[Exchange]:
    """Write the model's folder; the calls that are made of it, the same for every fleet."""
    save_random_policy(model, hidden_size=256, layers=4, seed=_SEED)
    return make_workload(model, count=_CALLS, max_tokens=_TOKENS, seed=_SEED)


@asynccontextmanager
async def standing_fleet(
    arm: Checkout, model: Path, exchanges: list[Exchange], http: aiohttp.ClientSession
) -> AsyncIterator[AgentCalls]:
    """A checkout's rollout server, gateway and Redis, warm, for the time of the block. `model`: from `make_calls`.

    Raises RollmeshError where one does not come up.
    """
    folder = model.with_name(f"calls-{arm.name}")
    folder.mkdir()
    async with running_redis(folder) as redis_url:
        plan = await plan_mesh(
            f"calls-{arm.name}",
            redis_url=redis_url,
            model=model,
            engine="torch",
            max_running=_AT_ONCE,
            folder=folder,
            of=arm,
        )
        async with running_fleet(plan, 1, http) as fleet:
            calls = AgentCalls(fleet, exchanges)
            await calls.figures()
            yield calls
