"""Groups of environment runners that are gone: given up at once, so that their places in admission are free again.

    runner ──join, heartbeat, leave──► any server ──► Redis ◄── every server looks, while it holds groups of runners
                                                                   └── gone: its groups are dropped, wherever they are

Who is gone is decided by `services.policies.runner_leases`. Groups that name no runner last for their idle time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog
from redis.exceptions import RedisError

from rollout_server.lifecycle.finish import Finisher
from rollout_server.sessions.group import GroupRegistry
from services.policies.runner_leases import Gone, RunnerLeases
from services.run_store.discovery import ServiceRegistry
from services.run_store.runners import RunnerRegistry
from services.wire.errors import ConflictError, NotReadyError, RollmeshError
from services.wire.rollout_api import Runner, RunnerLease

LOOK_EVERY_S = 0.5
_WATCHED_S = 2 * LOOK_EVERY_S

_log = structlog.get_logger()


class RunnerWatch:
    """The runners of a run as one server sees them. `run` is a task owned by the server."""

    def __init__(
        self,
        groups: GroupRegistry,
        finisher: Finisher,
        runners: RunnerRegistry,
        services: ServiceRegistry,
        lease_s: float,
    ) -> None:
        self._groups = groups
        self._finisher = finisher
        self._runners = runners
        self._services = services
        self._lease_s = lease_s
        self._leases = RunnerLeases(lease_s, _WATCHED_S)
        self._wake = asyncio.Event()

    async def join(self, runner: Runner) -> RunnerLease:
        """A runner has started. Raises NotReadyError when Redis fails, as the others do."""
        with _redis_needed():
            await self._runners.join(runner.name, runner.incarnation)
        self._wake.set()
        _log.info("runner joined", runner=runner.runner_id)
        return RunnerLease(lease_s=self._lease_s)

    async def renew(self, runner: Runner) -> RunnerLease:
        """It lives. Raises ConflictError for one that has left or was replaced."""
        with _redis_needed():
            renewed = await self._runners.renew(runner.name, runner.incarnation)
        if not renewed:
            what = f"runner {runner.name} has left the run, or is another process now"
            raise ConflictError(what, "give each runner of a run a name of its own")
        return RunnerLease(lease_s=self._lease_s)

    async def leave(self, runner: Runner) -> None:
        """It has ended in good order."""
        with _redis_needed():
            await self._runners.leave(runner.name, runner.incarnation)
        self._wake.set()
        _log.info("runner left", runner=runner.runner_id)

    async def run(self) -> None:
        """Give up the groups of runners that are gone, until cancelled."""
        failing = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._give_up(await self._look())
                failing = False
            except (RedisError, OSError) as error:
                if not failing:
                    _log.warning("cannot look for runners that are gone", why=repr(error))
                failing = True

    async def _look(self) -> dict[str, Gone]:
        held = {group.runner for group in self._groups.all_open() if group.runner is not None}
        if not held:
            return {}
        heard = await self._runners.heard()
        return self._leases.look(time.monotonic(), held, heard, reachable=await self._reachable())

    async def _reachable(self) -> bool:
        """Whether heartbeats have a way here: a gateway, or none that they would have to take."""
        gateways = [each.alive for each in await self._services.services() if each.record.kind == "gateway"]
        return not gateways or any(gateways)

    async def _give_up(self, gone: dict[str, Gone]) -> None:
        given_up: Counter[str] = Counter()
        for group in self._groups.all_open():
            if group.runner is None or group.runner not in gone:
                continue
            # One that another server has taken over meanwhile is that server's to give up.
            with suppress(RollmeshError):
                given_up[group.runner] += await self._finisher.drop(group, "runner_gone")
        for runner, groups in given_up.items():
            _log.warning("groups given up", runner=runner, why=gone[runner].value, groups=groups)


@contextmanager
def _redis_needed() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise NotReadyError(f"leases of runners need Redis, which failed ({error})", "send the call again") from error
