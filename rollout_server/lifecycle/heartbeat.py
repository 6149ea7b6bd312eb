"""Heartbeat: a server renews its registry record three times a lease, and at once when its state changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from services.run_store.discovery import Registry, ServerRecord

LEASE_S = 3.0
HEARTBEATS_A_LEASE = 3

_log = structlog.get_logger()


class Heartbeat:
    """`describe` gives the record of this moment. `run` is a task owned by the server."""

    def __init__(self, registry: Registry, describe: Callable[[], ServerRecord]) -> None:
        self._registry = registry
        self._describe = describe
        self._wake = asyncio.Event()

    def notify(self) -> None:
        """Send the next heartbeat now: the state has changed."""
        self._wake.set()

    async def beat(self) -> None:
        """One heartbeat. Raises RedisError."""
        await self._registry.announce(self._describe(), LEASE_S)

    async def run(self) -> None:
        """Renew until cancelled. A Redis that fails is tried again; meanwhile the lease may run out."""
        failing = False
        while True:
            self._wake.clear()
            try:
                await self.beat()
                failing = False
            except RedisError as error:
                if not failing:
                    _log.warning("cannot send the heartbeat", why=str(error))
                failing = True
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S / HEARTBEATS_A_LEASE):
                    await self._wake.wait()

    async def withdraw(self) -> None:
        """Remove this server from the registry. Raises RedisError."""
        record = self._describe()
        await self._registry.withdraw(record.server_id, record.incarnation)
