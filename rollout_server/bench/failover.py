"""Servers are killed under talking agents, one after another: how long does an agent hear nothing?

    agents talk ─► each server has its share ─► a random moment ─► kill -9 ─► all that it drew go on ─► started anew ─► …

A call counts that was in flight in a session of the killed server: whose group Redis says it held, just before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

from rollout_server.adoption import incarnation_of
from rollout_server.bench.fleet import Fleet
from rollout_server.bench.killed import Kill, Killed
from rollout_server.bench.silence import until_heard
from rollout_server.bench.talking_agents import AgentCall, TalkingAgents
from rollout_server.bench.workload import Exchange
from services.first_failure import first_failure
from services.redis_client import as_text, connect
from services.registry import Registry
from services.run_keys import RunKeys
from services.wire.errors import DeadlineError

_SOONEST_S, _LATEST_S = 0.2, 2.5
_WITHIN_S = 90.0
_LOOK_S = 0.02


async def kill_under_load(
    fleet: Fleet,
    questions: Sequence[Exchange],
    agents: int,
    kills: int,
    rng: random.Random,
    after_kill: Callable[[int, Kill], None],
) -> Killed:
    """Kill the servers in turn, each ready again before the next. Raises RollmeshError for the first error of any agent."""
    talking = TalkingAgents(fleet.gateway.arm, questions)
    redis = connect(fleet.plan.redis_url)
    killer = _Killer(fleet, talking, redis, agents, rng)
    killed = Killed()
    try:
        with first_failure():
            async with asyncio.TaskGroup() as tasks:
                for number in range(agents):
                    tasks.create_task(talking.talk(streams=number % 2 == 0))
                for number in range(kills):
                    victim = sorted(fleet.servers)[number % len(fleet.servers)]
                    kill = await killer.kill(victim)
                    killed.kills.append(kill)
                    after_kill(number + 1, kill)
                talking.finish()
    finally:
        await redis.aclose()
    killed.answers = talking.answers
    return killed


class _Killer:
    def __init__(self, fleet: Fleet, talking: TalkingAgents, redis: Redis, agents: int, rng: random.Random) -> None:
        self._fleet = fleet
        self._talking = talking
        self._redis = redis
        self._registry = Registry(redis, fleet.plan.run_id)
        self._owners = RunKeys(fleet.plan.run_id).owners
        self._share = max(agents // (2 * len(fleet.servers)), 1)
        self._rng = rng

    async def kill(self, server_id: str) -> Kill:
        """Kill a server at a random moment, see its calls go on elsewhere, start it anew."""
        await self._until(self._balanced, f"each server to hold {self._share} calls or more")
        await asyncio.sleep(self._rng.uniform(_SOONEST_S, _LATEST_S))
        # The death of a server that holds nothing says nothing.
        await self._until(self._balanced, f"each server to hold {self._share} calls again")
        calls = await self._calls_at(server_id)
        killed_at = time.monotonic()
        await self._fleet.kill(server_id)
        await self._until(lambda: _all_heard(calls, killed_at), "every call of a killed server to go on elsewhere")
        await self._fleet.start(server_id)
        return Kill(
            server_id,
            [heard for call in calls if call.streamed and (heard := _heard(call, killed_at)) is not None],
            [heard for call in calls if not call.streamed and (heard := _heard(call, killed_at)) is not None],
        )

    async def _balanced(self) -> bool:
        """Whether each server holds half its share or more: the one that was started last has new sessions only."""
        return all([len(await self._calls_at(each)) >= self._share for each in self._fleet.servers])

    async def _calls_at(self, server_id: str) -> list[AgentCall]:
        """What is in flight in sessions that a server, as it runs now, holds."""
        names = {incarnation_of(each) for each in await self._registry.servers() if each.server_id == server_id}
        owners = await self._redis.hgetall(self._owners)
        groups = {as_text(group) for group, owner in owners.items() if as_text(owner) in names}
        return [call for call in self._talking.in_flight if call.group_id in groups]

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        try:
            async with asyncio.timeout(_WITHIN_S):
                while True:
                    if await holds():
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise DeadlineError(f"waited {_WITHIN_S:.0f} s for {what}", self._fleet.gateway.child.tail()) from error


def _heard(call: AgentCall, killed_at: float) -> float | None:
    return until_heard(killed_at, call.began, call.arrivals)


async def _all_heard(calls: Sequence[AgentCall], killed_at: float) -> bool:
    return all(call.ended or _heard(call, killed_at) is not None for call in calls)
