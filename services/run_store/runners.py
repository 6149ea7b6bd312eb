"""Environment runners of a run in Redis: which incarnation has each name, when it was last heard of, whether it has left.

    join ──► heartbeat, several times a lease ──► leave          forgotten ten minutes after it was last heard of
      └── another incarnation joins under the name: heartbeats of the first are refused

Who is gone is not judged here (`services.policies.runner_leases`).
"""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from services.policies.runner_leases import Heard
from services.run_store.client import as_text
from services.run_store.keys import RunKeys

FORGOTTEN_AFTER_S = 600.0

# KEYS: runners, heartbeats. ARGV: name, record, how long runners are remembered (ms), '1' to join: else it is refused where
# another has the name. One whose record is lost takes hold of it again.
_HEAR = """
local found = redis.call('HGET', KEYS[1], ARGV[1])
if ARGV[4] ~= '1' and found and found ~= ARGV[2] then return 0 end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[3])) do
  redis.call('HDEL', KEYS[1], name)
  redis.call('ZREM', KEYS[2], name)
end
return 1
"""

# KEYS: runners. ARGV: name, record, record of one that has left. A later incarnation's name is not the earlier one's.
_LEAVE = """
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
"""


class _Record(msgspec.Struct, frozen=True):
    incarnation: str
    left: bool = False


_decoder = msgspec.json.Decoder(_Record)


class RunnerRegistry:
    """The runners of one run. All methods raise RedisError."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        keys = RunKeys(run_id)
        self._keys = [keys.runners, keys.runner_heartbeats]
        self._hear, self._leave = redis.register_script(_HEAR), redis.register_script(_LEAVE)

    async def join(self, name: str, incarnation: str) -> None:
        """The name is this incarnation's from now on."""
        await self._heard_of(name, incarnation, "1")

    async def renew(self, name: str, incarnation: str) -> bool:
        """It lives; returns False where it has left, or another incarnation has the name."""
        return await self._heard_of(name, incarnation, "")

    async def _heard_of(self, name: str, incarnation: str, joins: str) -> bool:
        record = msgspec.json.encode(_Record(incarnation))
        return bool(await self._hear(keys=self._keys, args=[name, record, round(FORGOTTEN_AFTER_S * 1000), joins]))

    async def leave(self, name: str, incarnation: str) -> None:
        """It has ended in good order; nothing where it has lost the name before."""
        here, gone = (msgspec.json.encode(_Record(incarnation, left)) for left in (False, True))
        await self._leave(keys=self._keys[:1], args=[name, here, gone])

    async def heard(self) -> dict[str, Heard]:
        """Every runner that is remembered, by name."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys[0])
            pipe.zrange(self._keys[1], 0, -1, withscores=True)
            packed, times = await pipe.execute()
        at = {as_text(name): int(milliseconds) for name, milliseconds in times}
        records = {as_text(name): _decoder.decode(record) for name, record in packed.items()}
        return {name: Heard(record.incarnation, at.get(name, 0), left=record.left) for name, record in records.items()}
