"""The registry: which rollout servers of a run are alive, what they serve and how busy they are, each for a lease.

    announce ──► alive for lease_s ──announce──► alive …          a server says so itself, three times a lease
                     │ withdraw | the lease runs out
                     ▼
                   gone

A server that starts again under the same name is another `incarnation`: what the old one held is not its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from redis.asyncio import Redis

from services.redis_client import as_text
from services.run_keys import RunKeys

ServerState = Literal["serving", "draining"]

# A later incarnation's record is not the earlier one's to take away.
_WITHDRAW = """
local found = redis.call('GET', KEYS[2])
if found and cjson.decode(found).incarnation == ARGV[2] then
  redis.call('DEL', KEYS[2])
  redis.call('SREM', KEYS[1], ARGV[1])
  return 1
end
return 0
"""


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout server as it describes itself. `url`: where agents and other services reach it."""

    server_id: str
    incarnation: str
    """Random, drawn at each start."""
    url: str
    state: ServerState
    model: str
    policy_version: int
    kv_policy: str = "keep"
    running: int = 0
    """Samples being drawn."""
    waiting: int = 0
    """Requests that wait for a place."""
    max_running: int = 0
    """Samples that it draws at once."""
    open_sessions: int = 0
    drawn_tokens: int = 0
    """Since it started."""


class Registry:
    """The servers of one run."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._withdraw = redis.register_script(_WITHDRAW)

    async def announce(self, record: ServerRecord, lease_s: float) -> None:
        """This server is alive for `lease_s` more seconds."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(self._keys.servers, record.server_id)
            pipe.set(self._keys.server(record.server_id), msgspec.json.encode(record), px=round(lease_s * 1000))
            await pipe.execute()

    async def withdraw(self, server_id: str, incarnation: str) -> bool:
        """This server ends; returns whether its record was still there."""
        keys = [self._keys.servers, self._keys.server(server_id)]
        return bool(await self._withdraw(keys=keys, args=[server_id, incarnation]))

    async def servers(self) -> list[ServerRecord]:
        """Those whose lease has not run out, by name."""
        names = sorted(as_text(name) for name in await self._redis.smembers(self._keys.servers))
        if not names:
            return []
        found = await self._redis.mget([self._keys.server(name) for name in names])
        return [msgspec.json.decode(packed, type=ServerRecord) for packed in found if packed is not None]
