"""The wait board: every blocked component says what it waits for, since when (promise 5: no silent wait)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog
from redis.asyncio import Redis

from services.redis_client import as_text
from services.run_keys import RunKeys

_log = structlog.get_logger()


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    waiting_for: str
    since: float
    """Unix seconds."""


class WaitBoard:
    """Posts a component's waits in Redis, where the live view and the dashboard read them."""

    def __init__(self, redis: Redis, run_id: str, component: str) -> None:
        self._redis = redis
        self._key = RunKeys(run_id).waits
        self._component = component

    async def post(self, waiting_for: str) -> None:
        wait = Wait(waiting_for=waiting_for, since=time.time())
        await self._redis.hset(self._key, self._component, msgspec.json.encode(wait))
        _log.info("waiting", waiting_for=waiting_for)

    async def clear(self) -> None:
        await self._redis.hdel(self._key, self._component)

    @asynccontextmanager
    async def waiting(self, waiting_for: str) -> AsyncIterator[None]:
        """Post for the time of the block."""
        await self.post(waiting_for)
        try:
            yield
        finally:
            await self.clear()


async def read_waits(redis: Redis, run_id: str) -> dict[str, Wait]:
    """Component → what it waits for now."""
    posted = await redis.hgetall(RunKeys(run_id).waits)
    return {as_text(component): msgspec.json.decode(wait, type=Wait) for component, wait in posted.items()}
