"""Admission queue in Redis: which groups may open, first come, first served across all rollout servers of a run.

The bounds are the policy's (`services/policies/admission.py`); a script compares them and changes the run's account in one
step. Groups that wait are queued by the time they were asked for: a later one is admitted only where all earlier ones are
served. An entry of the queue lasts for a lease, so that those of a dead server block nobody. Groups of a server whose
engine is behind the newest version could not be admitted yet: they wait outside the queue, and keep their time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from services.policies.admission import Account, AdmissionRules, StoreUse
from services.run_store.keys import RunKeys

ADMISSION_CLOSED = -1
RUN_CONCLUDED = -2
OPENED_BEFORE = -3
"""There is a journal of it, or another server is about to begin one."""

LEASE_S = 2.0
"""A server asks for those who wait there several times a lease."""

# KEYS: accounts, open groups, queue, leases of the queue; then the journal of each group that is asked for. ARGV: the
# policy's three bounds, server, Unix seconds, lease in ms, '1' where Redis holds too much; then group, when it was asked
# for, and whether it will be asked for again, for each who asks.
#
# A call repeated because its answer was lost on the way finds its groups open, and answers their ordinals again. A group
# that another server holds open is not this one's to join, nor is one that was written down: it is held, or has ended.
_ADMIT = """
local account = redis.call('HMGET', KEYS[1], 'opened_groups', 'dropped_groups', 'oldest_open', 'newest_limit',
  'skipped_groups', 'concluded')
for i = 1, 5 do account[i] = tonumber(account[i] or '0') end
local function leave(name) redis.call('ZREM', KEYS[3], name) redis.call('ZREM', KEYS[4], name) end

local opened, dropped, oldest, newest, skipped = unpack(account)
local open = redis.call('HLEN', KEYS[2])
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[3])
local free = math.min(limit - (opened - dropped + skipped), tonumber(ARGV[2]) - open)
local straggler = ''
-- The oldest known so far may have been closed since, but none older can have been opened: only where it is what closes
-- admission are all open groups looked at.
if open == 0 then oldest = opened
elseif oldest + window - opened < free then
  oldest = opened
  for _, record in ipairs(redis.call('HVALS', KEYS[2])) do
    local ordinal = cjson.decode(record)[1]
    if ordinal < oldest then oldest, straggler = ordinal, record end
  end
  redis.call('HSET', KEYS[1], 'oldest_open', oldest)
end
free = math.min(free, oldest + window - opened)
if ARGV[7] == '1' then free = math.min(free, 0) end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now)) do leave(name) end
if limit > newest then redis.call('HSET', KEYS[1], 'newest_limit', limit) end

local concluded = account[6] == '1'
local answers, before = {}, {}
for i = 8, #ARGV, 3 do
  local name, answer, ahead = ARGV[i], -1, 0
  local known = redis.call('HGET', KEYS[2], name)
  if redis.call('EXISTS', KEYS[5 + (i - 8) / 3]) == 1 then answer = -3
  elseif known then
    local record = cjson.decode(known)
    answer = record[2] == ARGV[4] and record[1] or -3
  elseif concluded then answer = -2
  else
    ahead = redis.call('ZCOUNT', KEYS[3], '-inf', '(' .. ARGV[i + 1])
    if ahead < free then
      answer = opened
      redis.call('HSET', KEYS[2], name, cjson.encode({opened, ARGV[4], ARGV[5]}))
      opened, open, free = opened + 1, open + 1, free - 1
    end
  end
  if answer == -1 and ARGV[i + 2] == '1' and limit >= newest then
    redis.call('ZADD', KEYS[3], ARGV[i + 1], name)
    redis.call('ZADD', KEYS[4], now + ARGV[6], name)
  else leave(name) end
  answers[#answers + 1], before[#before + 1] = answer, ahead
end
if opened > account[1] then redis.call('HSET', KEYS[1], 'opened_groups', opened) end
return {answers, before, {opened, dropped, open, oldest, skipped}, straggler}
"""


class OpenGroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`opened_at`: Unix seconds."""

    server_id: str
    ordinal: int
    opened_at: float


def decode_open_group(packed: bytes | str) -> OpenGroupRecord:
    ordinal, server_id, opened_at = msgspec.json.decode(packed)
    return OpenGroupRecord(server_id=server_id, ordinal=int(ordinal), opened_at=float(opened_at))


@dataclass(frozen=True, slots=True)
class Asking:
    """One group to be opened. `asked_at`: Unix seconds, the same at each attempt. `stays`: it will be asked for again."""

    group_id: str
    asked_at: float
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """`ordinal`, or ADMISSION_CLOSED or another of those; `ahead`: how many wait, on any server, who came before."""

    ordinal: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """What became of those who asked, and the account as they left it.

    `straggler`: the oldest open group, where it is that which closes admission.
    """

    answers: list[Answer]
    account: Account
    straggler: OpenGroupRecord | None


class AdmissionAccount:
    """One run's account of open groups, as far as admission goes. Every method is one round trip."""

    def __init__(self, redis: Redis, run_id: str, *, lease_s: float = LEASE_S) -> None:
        self._redis = redis
        self._run_keys = keys = RunKeys(run_id)
        self._queue = [keys.admission_queue, keys.admission_leases]
        self._keys = [keys.accounts, keys.open_groups, *self._queue]
        self._lease_ms = round(lease_s * 1000)
        self._admit = redis.register_script(_ADMIT)

    async def admit(
        self,
        asking: Sequence[Asking],
        server_id: str,
        *,
        rules: AdmissionRules,
        engine_version: int,
        store: StoreUse | None = None,
    ) -> Admitted:
        """Open those of the groups that the rules leave a place for, in their order; an answer for each.

        `store`: what Redis held a moment ago; None where that bounds nothing.
        """
        arguments: list[str | int] = [rules.limit(engine_version), rules.most_open, rules.window]
        arguments += [server_id, repr(time.time()), self._lease_ms]
        arguments.append("1" if store is not None and store.full else "0")
        keys = [*self._keys, *(self._run_keys.journal(each.group_id) for each in asking)]
        for each in asking:
            arguments += [each.group_id, repr(each.asked_at), "1" if each.stays else "0"]
        ordinals, ahead, counts, straggler = await self._admit(keys=keys, args=arguments)
        opened, dropped, open_, oldest, skipped = (int(count) for count in counts)
        return Admitted(
            [Answer(int(ordinal), int(before)) for ordinal, before in zip(ordinals, ahead, strict=True)],
            Account(opened=opened, dropped=dropped, open=open_, oldest=oldest, skipped=skipped),
            decode_open_group(straggler) if straggler else None,
        )

    async def leave(self, group_ids: Sequence[str]) -> None:
        """These are not waited for any more."""
        if not group_ids:
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in self._queue:
                pipe.zrem(key, *group_ids)
            await pipe.execute()
