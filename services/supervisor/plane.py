"""A rollout plane without a trainer, for as long as something uses it: Valkey, bus, rollout servers, gateway, rewards.

Valkey ─► the others at once ─► `during` ─► all of them stopped, Valkey last
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import TypeVar

from services.host.aio import to_its_end
from services.host.run_folder import RunFolder
from services.run_store.client import connect, reached_by
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PUBLIC, Trust
from services.supervisor.launch_plan import LaunchPlan
from services.supervisor.mesh import STOP_DEADLINE_S
from services.supervisor.on_demand import run_on_demand
from services.supervisor.processes import ManagedProcess, ProcessSpec, Reaper, Say
from services.supervisor.readiness import REDIS_DEADLINE_S, first_cause, wait_for_redis

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Result = TypeVar("_Result")


async def until_stopped(working: Coroutine[None, None, _Result]) -> _Result | signal.Signals:
    """What it comes to; or the signal that stopped it, where one did: nothing of it runs any more then."""
    task = asyncio.create_task(working)
    received: list[signal.Signals] = []

    def on_signal(which: signal.Signals) -> None:
        received.append(which)
        task.cancel()

    loop = asyncio.get_running_loop()
    for which in STOPPING:
        loop.add_signal_handler(which, on_signal, which)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]


async def run_plane(
    plan: LaunchPlan,
    folder: RunFolder,
    reaper: Reaper,
    say: Say,
    during: Callable[[], Awaitable[None]],
    *,
    bus: bool = False,
    at_last: asyncio.Event | None = None,
    keys: Keys = NO_KEYS,
    trust: Trust = PUBLIC,
) -> None:
    """Start the plane of `plan`, await `during`, stop it. `bus`: whether it has the weight bus, and a
    dashboard, which starts when it is called, or with `at_last`.

    Raises RollmeshError where a service gives up, or `during` fails.
    """

    def manage(*specs: ProcessSpec | None) -> list[ManagedProcess]:
        return [ManagedProcess(spec, folder.logs, reaper, say) for spec in specs if spec is not None]

    valkey = manage(plan.valkey)
    edge = manage(plan.bus if bus else None, plan.gateway, plan.rewards)
    page, at_last = manage(plan.dashboard if bus else None), at_last or asyncio.Event()
    servers = manage(*plan.servers)
    try:
        async with AsyncExitStack() as stack:
            redis = connect(reached_by(plan.redis_url, keys.redis, trust))
            stack.push_async_callback(redis.aclose)
            async with asyncio.TaskGroup() as tasks:
                lasting = [tasks.create_task(each.run()) for each in valkey]
                await wait_for_redis(redis, REDIS_DEADLINE_S)
                lasting += [tasks.create_task(each.run()) for each in (*edge, *servers)]
                lasting += [tasks.create_task(run_on_demand(each, plan.dashboard_port, say, at_last)) for each in page]
                await during()
                for task in lasting:
                    task.cancel()
    except BaseExceptionGroup as failed:
        raise first_cause(failed) from failed
    finally:
        await to_its_end(_stop(servers, [*edge, *page], valkey))


async def _stop(*ranks: list[ManagedProcess]) -> None:
    for rank in ranks:
        await asyncio.gather(*(managed.stop(STOP_DEADLINE_S) for managed in rank))
