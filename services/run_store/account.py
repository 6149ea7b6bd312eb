"""The run's account as the trainer audits it: counters, stream and open groups in one snapshot, and their correction.

count ──► compared with the step log (`services.policies.balance`) ──► correct, in one step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from services.policies.balance import Corrections, Counted
from services.run_store.client import as_text
from services.run_store.keys import RunKeys

# KEYS: accounts, dropped, stream, open groups, dropped groups, those of the generation before.
_COUNT = """
local function account(name) return tonumber(redis.call('HGET', KEYS[1], name) or '0') end
local function fields(list)
  local named = {}
  for i = 1, #list, 2 do named[list[i]] = list[i + 1] end
  return named
end
local dropped, read, unsettled, standing = 0, 0, 0, {}
for _, count in ipairs(redis.call('HVALS', KEYS[2])) do dropped = dropped + tonumber(count) end
if redis.call('EXISTS', KEYS[3]) == 1 then
  local stream = fields(redis.call('XINFO', 'STREAM', KEYS[3]))
  for _, each in ipairs(redis.call('XINFO', 'GROUPS', KEYS[3])) do
    local group = fields(each)
    if group['name'] == 'trainer' then
      unsettled = group['pending']
      if group['last-delivered-id'] == stream['last-generated-id'] then read = 1 end
    end
  end
end
for _, name in ipairs(redis.call('HKEYS', KEYS[4])) do
  if redis.call('SISMEMBER', KEYS[5], name) == 0 and redis.call('SISMEMBER', KEYS[6], name) == 0 then
    standing[#standing + 1] = name
  end
end
local told = redis.pcall('INFO', 'server')
local process = type(told) == 'string' and string.match(told, 'run_id:(%w+)') or ''
return {process, read, {account('published'), account('trained'), dropped, unsettled, account('opened_groups'),
  account('closed_groups'), account('dropped_groups'), redis.call('HLEN', KEYS[4])}, standing}
"""

# KEYS: accounts. ARGV: what is unaccounted for, '1' where it is corrected, then counter and what is added to it.
_CORRECT = """
redis.call('HSET', KEYS[1], 'unaccounted', ARGV[1])
if ARGV[2] == '1' then
  redis.call('HINCRBY', KEYS[1], 'corrected', ARGV[1])
  for i = 3, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""

# KEYS: stream. ARGV: ids. Answers those that it does not hold.
_MISSING = """
local missing = {}
for _, id in ipairs(ARGV) do
  if #redis.call('XRANGE', KEYS[1], id, id) == 0 then missing[#missing + 1] = id end
end
return missing
"""
_AT_ONCE = 512
_COUNTERS = (
    *("published", "trained", "dropped", "unsettled"),
    *("opened_groups", "closed_groups", "dropped_groups", "open_groups"),
)
"""As _COUNT answers them."""


@dataclass(frozen=True)
class Snapshot:
    """`process`: Redis' run id, another one after each start; empty where it does not tell. `read`: everything in the
    stream has been delivered."""

    process: str
    read: bool
    counted: Counted


class RunAccount:
    """The account of one run. All methods raise RedisError."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        keys = RunKeys(run_id)
        self._counted = [keys.accounts, keys.dropped, keys.stream, keys.open_groups]
        self._counted += [keys.dropped_groups, keys.earlier_dropped_groups]
        self._accounts, self._stream = keys.accounts, keys.stream
        self._count = redis.register_script(_COUNT)
        self._correct = redis.register_script(_CORRECT)
        self._missing = redis.register_script(_MISSING)

    async def count(self) -> Snapshot:
        process, read, counters, standing = await self._count(keys=self._counted)
        named = dict(zip(_COUNTERS, map(int, counters), strict=True))
        return Snapshot(as_text(process), bool(read), Counted(**named, standing=frozenset(map(as_text, standing))))

    async def note(self, unaccounted: int) -> None:
        """The account was compared, and is wrong by so many."""
        await self._correct(keys=[self._accounts], args=[unaccounted, "0"])

    async def correct(self, wanted: Corrections) -> None:
        """Not to be repeated where its answer is lost: the next comparison says what is still wrong."""
        counters = ("published", "trained", "opened_groups", "closed_groups", "dropped_groups")
        arguments: list[str | int] = [wanted.unaccounted, "1"]
        for name in counters:
            arguments += [name, getattr(wanted, name)]
        await self._correct(keys=[self._accounts], args=arguments)

    async def missing(self, stream_ids: Sequence[str]) -> list[str]:
        """Those of the entries that the stream does not hold (any more)."""
        found: list[str] = []
        for at in range(0, len(stream_ids), _AT_ONCE):
            reply = await self._missing(keys=[self._stream], args=list(stream_ids[at : at + _AT_ONCE]))
            found += map(as_text, reply)
        return found
