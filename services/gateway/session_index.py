"""Whether a session id is one of ours: trainers' clients send ids of their own making with the token route."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.run_keys import RunKeys

_LOOK_WITHIN_S = 2.0


class SessionIndex:
    """The sessions that the servers of a run have opened, as they stand in Redis."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)

    async def holds(self, session_id: str) -> bool:
        """Whether a server has opened this session. While Redis fails every id counts as one: servers know better."""
        try:
            async with asyncio.timeout(_LOOK_WITHIN_S):
                return bool(await self._redis.exists(self._keys.group_of(session_id)))
        except (RedisError, OSError, TimeoutError):
            return True
