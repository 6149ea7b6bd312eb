"""The ledger: a run's accounts in Redis, changed atomically by the services that know.

| account          | counts       | raised by                                                       |
|------------------|--------------|-----------------------------------------------------------------|
| opened_groups    | groups       | a rollout server, when admission lets a group in                |
| closed_groups    | groups       | a rollout server, when a group was finished, or expired          |
| dropped_groups   | groups       | whoever finds that an opened group will never be trained: a      |
|                  |              | rollout server, or the trainer once some of it is in the stream  |
| published        | trajectories | the stream, in one script with the append                       |
| trained          | trajectories | the trainer, in one script with the acknowledgement             |
| dropped{cause}   | trajectories | the trainer (published but never trained), by cause             |

At the end of a run `published == trained + Σ dropped`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from services.policies.admission import admission_limit
from services.redis_client import as_text
from services.run_keys import RunKeys
from services.wire.errors import NotReadyError


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    opened_groups: int = 0
    closed_groups: int = 0
    dropped_groups: int = 0
    published: int = 0
    trained: int = 0
    base_version: int = 0
    concluded: bool = False
    final_version: int | None = None
    dropped: dict[str, int] = msgspec.field(default_factory=dict)

    def dropped_total(self) -> int:
        return sum(self.dropped.values())


class OpenGroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    server_id: str
    ordinal: int
    opened_at: float


# Admission must compare and add in one step: two servers share the account. The limit itself comes from the policy.
# A call repeated because its answer was lost on the way finds its groups open, and answers their ordinals again. A group
# that another server holds open is not this one's to join.
_OPEN = """
local concluded = redis.call('HGET', KEYS[1], 'concluded') == '1'
local opened = tonumber(redis.call('HGET', KEYS[1], 'opened_groups') or '0')
local dropped = tonumber(redis.call('HGET', KEYS[1], 'dropped_groups') or '0')
local ordinals, fields = {}, {}
for i = 4, #ARGV do
  local known = redis.call('HGET', KEYS[2], ARGV[i])
  if known then
    local record = cjson.decode(known)
    ordinals[#ordinals + 1] = record[2] == ARGV[2] and record[1] or -3
  elseif concluded then ordinals[#ordinals + 1] = -2
  elseif opened - dropped >= tonumber(ARGV[1]) then ordinals[#ordinals + 1] = -1
  else
    ordinals[#ordinals + 1] = opened
    fields[#fields + 1] = ARGV[i]
    fields[#fields + 1] = cjson.encode({opened, ARGV[2], ARGV[3]})
    opened = opened + 1
  end
end
if #fields > 0 then
  redis.call('HSET', KEYS[1], 'opened_groups', opened)
  redis.call('HSET', KEYS[2], unpack(fields))
end
return ordinals
"""

# A group of which something is in the stream is the trainer's to drop, or both would count it.
_CLOSE = """
local closed, dropped = 0, 0
for i = 2, #ARGV do
  if redis.call('HDEL', KEYS[2], ARGV[i]) == 1 then
    closed = closed + 1
    if redis.call('HDEL', KEYS[3], ARGV[i]) == 0 and ARGV[1] == '1' then dropped = dropped + 1 end
  end
end
if closed > 0 then redis.call('HINCRBY', KEYS[1], 'closed_groups', closed) end
if dropped > 0 then redis.call('HINCRBY', KEYS[1], 'dropped_groups', dropped) end
return closed
"""

ADMISSION_CLOSED = -1
RUN_CONCLUDED = -2
HELD_ELSEWHERE = -3


class Ledger:
    """One run's accounts. Every method is one round trip."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._open = redis.register_script(_OPEN)
        self._close = redis.register_script(_CLOSE)

    async def open_group(
        self, group_id: str, server_id: str, *, engine_version: int, base_version: int, k: int, batch: int
    ) -> int:
        """Open a group if the admission policy allows it; returns its ordinal, or ADMISSION_CLOSED or another of those."""
        ordinals = await self.open_groups_in_order(
            [group_id], server_id, engine_version=engine_version, base_version=base_version, k=k, batch=batch
        )
        return ordinals[0]

    async def open_groups_in_order(
        self, group_ids: Sequence[str], server_id: str, *, engine_version: int, base_version: int, k: int, batch: int
    ) -> list[int]:
        """`open_group` for several, first come first served, in one round trip: an answer for each of `group_ids`."""
        limit = admission_limit(engine_version, base_version, k, batch)
        keys = [self._keys.accounts, self._keys.open_groups]
        ordinals = await self._open(keys=keys, args=[limit, server_id, repr(time.time()), *group_ids])
        return [int(ordinal) for ordinal in ordinals]

    async def close_group(self, group_id: str, *, dropped: bool = False) -> bool:
        """Take a group off the open account (once).

        `dropped`: it was not finished in good order. It counts as dropped unless something of it is in the stream: then the
        trainer finds that its siblings never come, and drops it.
        """
        return await self.close_groups([group_id], dropped=dropped) == 1

    async def close_groups(self, group_ids: Sequence[str], *, dropped: bool = False) -> int:
        """`close_group` for several in one round trip; returns how many were open."""
        keys = [self._keys.accounts, self._keys.open_groups, self._keys.published_groups]
        return int(await self._close(keys=keys, args=["1" if dropped else "0", *group_ids]))

    async def still_open(self, group_ids: Sequence[str]) -> set[str]:
        """Those of the groups of which more may come."""
        if not group_ids:
            return set()
        records = await self._redis.hmget(self._keys.open_groups, list(group_ids))
        return {group_id for group_id, record in zip(group_ids, records, strict=True) if record is not None}

    async def session_secret(self) -> bytes:
        """What the run's session keys are made with; the first server to ask draws it."""
        await self._redis.set(self._keys.session_secret, secrets.token_bytes(32), nx=True)
        secret = await self._redis.get(self._keys.session_secret)
        if not isinstance(secret, bytes):
            raise NotReadyError(f"run {self._keys.run_id} has lost its session secret", "see whether Redis evicts keys")
        return secret

    async def stream_id_of(self, trajectory_id: str) -> str | None:
        """The entry of a trajectory that was published, by any server and in any earlier life of it."""
        found = await self._redis.hget(self._keys.stream_ids, trajectory_id)
        return None if found is None else as_text(found)

    async def drop_closed_group(self) -> None:
        """Count a group that was closed in good order but will never be trained, so that admission makes up for it."""
        await self._redis.hincrby(self._keys.accounts, "dropped_groups", 1)

    async def begin(self, base_version: int) -> int:
        """Set the version that the run starts from, once; returns the one in force."""
        await self._redis.hsetnx(self._keys.accounts, "base_version", str(base_version))
        return (await self.accounts()).base_version

    async def conclude(self, final_version: int) -> None:
        """No new groups and no more trajectories from here on."""
        await self._redis.hset(self._keys.accounts, mapping={"concluded": 1, "final_version": final_version})

    async def accounts(self) -> Accounts:
        counters, dropped = await self._snapshot()
        final = counters.get("final_version")
        return Accounts(
            opened_groups=int(counters.get("opened_groups", 0)),
            closed_groups=int(counters.get("closed_groups", 0)),
            dropped_groups=int(counters.get("dropped_groups", 0)),
            published=int(counters.get("published", 0)),
            trained=int(counters.get("trained", 0)),
            base_version=int(counters.get("base_version", 0)),
            concluded=counters.get("concluded") == "1",
            final_version=None if final is None else int(final),
            dropped={cause: int(count) for cause, count in dropped.items()},
        )

    async def _snapshot(self) -> tuple[dict[str, str], dict[str, str]]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.accounts)
            pipe.hgetall(self._keys.dropped)
            counters, dropped = await pipe.execute()
        return _text(counters), _text(dropped)

    async def open_groups(self) -> dict[str, OpenGroupRecord]:
        """Groups that were opened and neither finished nor expired."""
        records = {}
        for group_id, packed in (await self._redis.hgetall(self._keys.open_groups)).items():
            ordinal, server_id, opened_at = msgspec.json.decode(packed)
            records[as_text(group_id)] = OpenGroupRecord(
                server_id=server_id, ordinal=int(ordinal), opened_at=float(opened_at)
            )
        return records


def _text(mapping: dict[bytes, bytes]) -> dict[str, str]:
    return {as_text(key): as_text(value) for key, value in mapping.items()}
