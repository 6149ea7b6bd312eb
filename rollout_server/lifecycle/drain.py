"""Draining: a server lets go of what it holds, so that others go on with it, and takes nothing new.

    serving ──drain──► engine interrupted (partial answers are in the journal) ──► each group let go of as soon as nothing
                       goes on in it ──► (deadline: the rest, its calls ended) ──► drained

Where no other server is serving there is nobody to take the groups: then they are given up when the process ends.
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
        """Servers that would take what this one lets go of. Raises RedisError."""
        servers = await self._servers.servers()
        return [each.name for each in servers if each.state == "serving" and each.name != self._server_id]

    async def drain(self, within_s: float) -> bool:
        """Let go of everything; returns whether somebody else can take it. Raises RedisError."""
        started = time.monotonic()
        await self._begin()
        await self._engine.abort()
        if not await self.others():
            return False
        held, why = len(self._groups), DrainingError(f"rollout server {self._server_id} is being drained", "try again")
        while True:
            left = self._groups.all_open()
            late = time.monotonic() - started > within_s
            await self._let_go([group for group in left if late or not group.taking_turns], why)
            if not len(self._groups):
                break
            # What had not begun when the first were interrupted has begun by now.
            await self._engine.abort()
            await asyncio.sleep(_POLL_S)
        _log.info("drained", groups=held, after_s=round(time.monotonic() - started, 2))
        return True

    async def hand_over(self, why: RollmeshError) -> None:
        """Let go of everything at once, its calls ended with `why`, if somebody would take it. Raises RedisError."""
        groups = self._groups.all_open()
        if groups and await self.others():
            await self._let_go(groups, why)
            _log.info("handed over", groups=len(groups), why=why.what)

    async def _let_go(self, groups: list[Group], why: RollmeshError) -> None:
        names = [group.group_id for group in groups]
        await self._journal.let_go(names)
        for name in names:
            self._groups.let_go(name, why)


# Watching the engine: one that serves nothing any more, behind a server that lives, must not keep its sessions.
#
# serving ──the engine fails──► announced as draining, groups let go of, none taken ──it serves again──► serving

POLL_S = 0.5


class EngineWatch:
    """`run` is a task owned by the server."""

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
