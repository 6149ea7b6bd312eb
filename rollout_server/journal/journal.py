"""Write-ahead journal of groups in Redis: only the owner writes, and nothing is told to an agent before it is written.

    append ──► queue ──► everything queued: one script ──► applied here, in the journal's order ──► told to the agent
                              │ not the owner any more, or Redis failed: nothing is applied, the group is released,
                              └── and the next call reads it again from the journal, here or at another server

    owners:  group ─► me        held            ─► ""   released (draining)       (no entry) ended, or never was

An element is appended at the position that the owner knows to be next, so a script that the client library repeats after a
lost connection appends nothing twice, and a server that has lost the group appends nothing at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollout_server.journal import records
from services.run_store.client import as_text
from services.run_store.keys import RunKeys
from services.run_store.undelivered import UndeliveredCalls
from services.wire.errors import DrainingError, NotReadyError, RollmeshError

KEEP_ENDED_S = 600
"""How long the journal of a group that has ended is kept, for calls that come late."""
KEEP_ANSWER_S = 60
KEEP_PARTIAL_S = 3600
KEEP_NAME_S = 7 * 86_400
"""How long it is known which group a session is of, where its server dies before it could write anything else of it."""
RELEASED = ""
_AT_ONCE = 256

_log = structlog.get_logger()
T = TypeVar("T")

# KEYS: owners; then for each item journal, partial answer, answer, undelivered calls. ARGV: owner; then for each item
# group, position, payload, '1' for a partial answer's part ('' for a record), answer, the call that is answered.
# Answers 1 for each that is in the journal now.
_WRITE = """
local done = {}
local at = 2
for i = 2, #KEYS, 4 do
  local group, position, payload, part, answer = ARGV[at], tonumber(ARGV[at+1]), ARGV[at+2], ARGV[at+3], ARGV[at+4]
  local call = ARGV[at+5]
  at = at + 6
  local ok = redis.call('HGET', KEYS[1], group) == ARGV[1]
  if ok and part ~= '' then
    redis.call('RPUSH', KEYS[i+1], payload)
    redis.call('EXPIRE', KEYS[i+1], ARGV[#ARGV - 1])
  elseif ok then
    local length = redis.call('LLEN', KEYS[i])
    if length == position then
      redis.call('RPUSH', KEYS[i], payload)
      redis.call('UNLINK', KEYS[i+1])
      if answer ~= '' then redis.call('SET', KEYS[i+2], answer, 'EX', ARGV[#ARGV]) end
      if call ~= '' then redis.call('SREM', KEYS[i+3], call) end
    else
      ok = redis.call('LINDEX', KEYS[i], position) == payload
    end
  end
  done[#done + 1] = ok and 1 or 0
end
return done
"""

# KEYS: owners, journal, then group-of of each session. ARGV: owner, group, payloads. Takes hold of a new group.
_OPEN = """
local owner = redis.call('HGET', KEYS[1], ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 1 then
  if owner == ARGV[1] and redis.call('LINDEX', KEYS[2], 0) == ARGV[3] then return 1 end
  return 0
end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[1])
for i = 3, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
for i = 3, #KEYS do redis.call('SET', KEYS[i], ARGV[2]) end
return 1
"""

# KEYS: owners, journal, open groups. ARGV: group, expected owner, new owner, its server id.
_CLAIM = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return false end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
local known = redis.call('HGET', KEYS[3], ARGV[1])
if known then
  local record = cjson.decode(known)
  redis.call('HSET', KEYS[3], ARGV[1], cjson.encode({record[1], ARGV[4], record[3]}))
end
return redis.call('LRANGE', KEYS[2], 0, -1)
"""

# KEYS: owners, journal, undelivered calls, then group-of of each session. ARGV: owner, group, payload, seconds.
_CONCLUDE = """
local owner = redis.call('HGET', KEYS[1], ARGV[2])
if owner and owner ~= ARGV[1] then return 0 end
if owner then
  redis.call('RPUSH', KEYS[2], ARGV[3])
  redis.call('HDEL', KEYS[1], ARGV[2])
end
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
"""

# KEYS: owners. ARGV: owner, groups.
_RELEASE = """
for i = 2, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then redis.call('HSET', KEYS[1], ARGV[i], '') end
end
return 1
"""


@dataclass(slots=True, eq=False)
class _Item:
    group_id: str
    payload: bytes
    partial: str
    """The partial answer's key: to append to, or to remove."""
    part: bool
    answer_key: str
    answer: bytes
    then: Callable[[], Any]
    done: asyncio.Future[Any]
    call: str = ""
    position: int = 0


class Journal:
    """Writes as `owner`, the incarnation of server `server_id`. `on_lost` is told of each group that is no longer sure."""

    def __init__(
        self, redis: Redis, run_id: str, owner: str, server_id: str, on_lost: Callable[[str, RollmeshError], None]
    ) -> None:
        self.owner = owner
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._server_id = server_id
        self._on_lost = on_lost
        self._undelivered = UndeliveredCalls(redis, run_id)
        self._write = redis.register_script(_WRITE)
        self._open = redis.register_script(_OPEN)
        self._claim = redis.register_script(_CLAIM)
        self._conclude = redis.register_script(_CONCLUDE)
        self._release = redis.register_script(_RELEASE)
        self._lengths: dict[str, int] = {}
        """Elements in the journal of each group that is held."""
        self._queue: list[_Item] = []
        self._wake = asyncio.Event()

    async def open(self, began: records.GroupBegan, sessions: Sequence[records.SessionBegan]) -> None:
        """Begin the journal of a new group and take hold of it. Raises DrainingError when another server has it."""
        group_id, opening = began.group_id, [records.encode_record(began), *map(records.encode_record, sessions)]
        names = [self._keys.group_of(each.session_id) for each in sessions]
        try:
            keys = [self._keys.owners, self._keys.journal(group_id), *names]
            held = await self._open(keys=keys, args=[self.owner, group_id, *opening])
        except RedisError as error:
            raise _failed(error) from error
        if not held:
            raise _lost(group_id)
        self._lengths[group_id] = len(opening)

    async def join(self, group_id: str, session: records.SessionBegan, then: Callable[[], T]) -> T:
        """A further sibling. Raises as `append` does."""
        try:
            await self._redis.set(self._keys.group_of(session.session_id), group_id, ex=KEEP_NAME_S)
        except RedisError as error:
            raise _failed(error) from error
        return await self.append(group_id, session, then)

    async def append(
        self,
        group_id: str,
        record: records.Record,
        then: Callable[[], T],
        *,
        partial: str | None = None,
        answer: tuple[str, bytes] | None = None,
        call: str | None = None,
    ) -> T:
        """Write `record`, then run `then` and return its result: in the journal's order, also if the caller was cancelled.

        `partial`: key of one that the record replaces. `answer`: its name, and bytes to keep for those who ask again.
        `call`: the one that is answered, by a gateway's name; what was noted of an earlier try of it counts no more.
        Raises DrainingError when the group is another's, NotReadyError when Redis fails; then nothing was applied.
        """
        name, kept = answer or ("", b"")
        answer_key = self._keys.answer(group_id, name)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        item = _Item(
            group_id,
            records.encode_record(record),
            partial or answer_key,
            False,
            answer_key,
            kept,
            then,
            done,
            call or "",
        )
        return await self._enqueue(item)  # type: ignore[no-any-return]

    async def add_partial(self, group_id: str, partial: str, part: records.PartialHead | records.PartialPart) -> None:
        """Append to a partial answer. Raises as `append` does."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._enqueue(_Item(group_id, records.encode_record(part), partial, True, partial, b"", _nothing, done))

    async def _enqueue(self, item: _Item) -> Any:
        self._queue.append(item)
        self._wake.set()
        return await item.done

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await self._wake.wait()
            batch, self._queue = self._queue[:_AT_ONCE], self._queue[_AT_ONCE:]
            if not self._queue:
                self._wake.clear()
            await self._write_all(batch)

    async def _write_all(self, batch: list[_Item]) -> None:
        held = [item for item in batch if item.group_id in self._lengths]
        for item in batch:
            if item.group_id not in self._lengths:
                _fail(item, _lost(item.group_id))
        if not held:
            return
        keys: list[str] = [self._keys.owners]
        args: list[str | bytes | int] = [self.owner]
        ahead: dict[str, int] = {}
        for item in held:
            if not item.part:
                item.position = self._lengths[item.group_id] + ahead.get(item.group_id, 0)
                ahead[item.group_id] = ahead.get(item.group_id, 0) + 1
            keys += [self._keys.journal(item.group_id), item.partial, item.answer_key]
            # Only an answer to a named call has one: a part of it, written for every chunk, names no key of its own.
            keys.append(self._keys.undelivered(item.group_id) if item.call else item.answer_key)
            args += [item.group_id, item.position, item.payload, "1" if item.part else "", item.answer, item.call]
        try:
            answers = await self._write(keys=keys, args=[*args, KEEP_PARTIAL_S, KEEP_ANSWER_S])
        except RedisError as error:
            # Nobody knows what of it was written.
            _log.warning("the journal cannot be written", items=len(held), error=str(error))
            failure = _failed(error)
            for group_id in {item.group_id for item in held}:
                self._lose(group_id, failure)
            for item in held:
                _fail(item, failure)
            return
        for item, written in zip(held, answers, strict=True):
            if written and item.group_id in self._lengths:
                if not item.part:
                    self._lengths[item.group_id] = item.position + 1
                _settle(item)
            else:
                lost = _lost(item.group_id)
                self._lose(item.group_id, lost)
                _fail(item, lost)

    async def conclude(self, group_id: str, ended: records.GroupEnded, session_ids: Sequence[str]) -> None:
        """Write the end of the group and remove its owner. Raises as `append` does, and RedisError."""
        keys = [self._keys.owners, self._keys.journal(group_id), self._keys.undelivered(group_id)]
        keys += map(self._keys.group_of, session_ids)
        if not await self._conclude(keys=keys, args=[self.owner, group_id, records.encode_record(ended), KEEP_ENDED_S]):
            lost = _lost(group_id)
            self._lose(group_id, lost)
            raise lost
        self._lengths.pop(group_id, None)

    async def release(self, group_ids: Sequence[str]) -> None:
        """Any server may take over these groups now. Raises RedisError."""
        if group_ids:
            await self._release(keys=[self._keys.owners], args=[self.owner, *group_ids])
        for group_id in group_ids:
            self._lengths.pop(group_id, None)

    async def group_of(self, session_id: str) -> str | None:
        found = await self._redis.get(self._keys.group_of(session_id))
        return None if found is None else as_text(found)

    async def owner_of(self, group_id: str) -> str | None:
        """Who holds the group: an incarnation, RELEASED, or None for one that has ended or never was."""
        found = await self._redis.hget(self._keys.owners, group_id)
        return None if found is None else as_text(found)

    async def owners(self) -> dict[str, str]:
        """Open group → its owner."""
        found = await self._redis.hgetall(self._keys.owners)
        return {as_text(group): as_text(owner) for group, owner in found.items()}

    async def read(self, group_id: str) -> list[records.Record]:
        """The journal of a group; empty where there is none."""
        found = await self._redis.lrange(self._keys.journal(group_id), 0, -1)
        return [records.decode_record(packed) for packed in _bytes(found)]

    async def claim(self, group_id: str, expected: str) -> list[records.Record] | None:
        """Take hold of a group that `expected` holds, and read it; None when another server was faster."""
        keys = [self._keys.owners, self._keys.journal(group_id), self._keys.open_groups]
        found = await self._claim(keys=keys, args=[group_id, expected, self.owner, self._server_id])
        if found is None:
            return None
        journal = [records.decode_record(packed) for packed in _bytes(found)]
        self._lengths[group_id] = len(journal)
        return journal

    def partial_key(self, session_id: str, call: str) -> str:
        return self._keys.partial(session_id, call)

    async def read_partial(self, partial: str) -> list[records.PartialHead | records.PartialPart]:
        """What there is of a partial answer, in order, nothing twice."""
        parts: list[records.PartialHead | records.PartialPart] = []
        numbers: set[int] = set()
        for packed in _bytes(await self._redis.lrange(partial, 0, -1)):
            part = records.decode_partial(packed)
            number = part.number if isinstance(part, records.PartialPart) else 0
            if number not in numbers:
                numbers.add(number)
                parts.append(part)
        return parts

    async def kept_answers(self, group_id: str, names: Sequence[str]) -> list[bytes | None]:
        """The bytes of answers, where they are still kept."""
        if not names:
            return []
        found = await self._redis.mget([self._keys.answer(group_id, name) for name in names])
        return cast("list[bytes | None]", found)

    async def give_again(self, group_id: str, call: str) -> None:
        """The answer to `call`, which is in the journal, is given once more. Raises NotReadyError when Redis fails."""
        try:
            await self._undelivered.withdraw(group_id, call)
        except RedisError as error:
            raise _failed(error) from error

    def _lose(self, group_id: str, why: RollmeshError) -> None:
        self._lengths.pop(group_id, None)
        self._on_lost(group_id, why)


def _settle(item: _Item) -> None:
    try:
        result = item.then()
    except Exception as error:  # noqa: BLE001 - raised again in the waiting callers
        if not item.done.done():
            item.done.set_exception(error)
        return
    if not item.done.done():
        item.done.set_result(result)


def _fail(item: _Item, error: RollmeshError) -> None:
    if not item.done.done():
        item.done.set_exception(error)


def _bytes(reply: object) -> list[bytes]:
    return cast("list[bytes]", reply)


def _nothing() -> None:
    """A part of a partial answer changes nothing in memory."""


def _lost(group_id: str) -> DrainingError:
    return DrainingError(f"group {group_id} was taken over by another server", "send the call again")


def _failed(error: RedisError) -> NotReadyError:
    return NotReadyError(f"the journal needs Redis, which failed ({error})", "send the call again")
