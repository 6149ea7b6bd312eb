"""Draining a server: it releases the groups that it holds, so that other servers take them over, and takes nothing new.

    serving ──drain──► engine interrupted (partial answers are in the journal) ──► each group released as soon as no call
                       runs in it ──► (deadline: the rest, its calls ended) ──► drained

Where no other server is serving nobody can take the groups over: then they are dropped when the process ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError

from rollout_server.engines.base import Engine
from rollout_server.journal.journal import Journal
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.group import Group, GroupRegistry
from services.run_store.discovery import Heartbeat, ServiceRegistry
from services.wire.errors import DrainingError, NotReadyError, RollmeshError

_POLL_S = 0.02
_log = structlog.get_logger()


class Drainer:
    """Drains one server, once. `begin` tells the rest of the server, and the registry, that it has begun."""

    def __init__(
        self,
        engine: Engine,
        groups: GroupRegistry,
        journal: Journal,
        servers: ServiceRegistry,
        server_id: str,
        begin: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._journal = journal
        self._servers = servers
        self._server_id = server_id
        self._begin = begin

    async def others(self) -> list[str]:
        """Servers that could take over what this one releases. Raises RedisError."""
        servers = await self._servers.servers()
        return [each.name for each in servers if each.state == "serving" and each.name != self._server_id]

    async def drain(self, within_s: float) -> bool:
        """Release all groups; returns whether another server can take them over. Raises RedisError."""
        started = time.monotonic()
        await self._begin()
        await self._engine.abort()
        if not await self.others():
            return False
        held, why = len(self._groups), DrainingError(f"rollout server {self._server_id} is being drained", "try again")
        while True:
            left = self._groups.all_open()
            late = time.monotonic() - started > within_s
            await self._release([group for group in left if late or not group.taking_turns], why)
            if not len(self._groups):
                break
            # What had not begun when the first were interrupted has begun by now.
            await self._engine.abort()
            await asyncio.sleep(_POLL_S)
        _log.info("drained", groups=held, after_s=round(time.monotonic() - started, 2))
        return True

    async def hand_over(self, why: RollmeshError) -> None:
        """Release all groups at once, ending their calls with `why`, if another server can take them. Raises RedisError."""
        groups = self._groups.all_open()
        if groups and await self.others():
            await self._release(groups, why)
            _log.info("handed over", groups=len(groups), why=why.what)

    async def _release(self, groups: list[Group], why: RollmeshError) -> None:
        names = [group.group_id for group in groups]
        await self._journal.release(names)
        for name in names:
            self._groups.forget_open(name, why)


POLL_S = 0.5


class EngineWatch:
    """Releases the groups of a server whose engine has failed, until it serves again. `run` is a task of the server.

    serving ──engine fails──► registered as draining, groups released, none taken over ──engine serves again──► serving
    """

    def __init__(self, engine: Engine, takeover: Takeover, drainer: Drainer, heartbeat: Heartbeat) -> None:
        self._engine = engine
        self._takeover = takeover
        self._drainer = drainer
        self._heartbeat = heartbeat

    async def run(self) -> None:
        """Watch until cancelled."""
        failed: str | None = None
        while True:
            await asyncio.sleep(POLL_S)
            failure = self._engine.status().failure
            if failure != failed:
                _log.warning("engine", failure=failure)
                failed = failure
                self._takeover.taking = failure is None
                self._heartbeat.notify()
            if failure is not None:
                try:
                    await self._drainer.hand_over(NotReadyError(failure, "send the call again"))
                except RedisError as error:
                    _log.warning("cannot hand sessions over", why=str(error))
