"""The trajectory stream: durable, exactly once in, at least once out, acknowledged when the gradient is durable.

    rollout server ── publish ──► XADD (once a trajectory id) ──► pending ──► trained | dropped ──► XACK
                                                                    │          │
                                                                    │          └──► dead letter, with the reason
                              a trainer that died left entries pending: its successor reads them first

Acknowledging does not delete: entries stay until `trim`, so that a trainer can replay its step log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.run_store.blobs import END_BLOBS, BlobStore
from services.run_store.client import LONGEST_BLOCK_MS, as_text
from services.run_store.keys import RunKeys
from services.wire.choices import BlobError, BlobRef, read_reference

GROUP = "trainer"

READ_BYTES, FETCHED_AT_ONCE = 32 << 20, 64
FIRST_ENTRY_BYTES = 256 << 10
"""What an entry is taken to be before the first was read."""

# ARGV: '' when trained, else the cause of the drop; dead letters to keep, bytes of the largest; the beginning of the keys
# of blobs; how many stream ids have no dead letter, and those; then each of the others with its reason. Only what was
# really pending is counted. What was trained keeps its blob until it is trimmed: a trainer may have to replay it.
_SETTLE = (
    END_BLOBS
    + """
local function settled(from, to)
  local done = 0
  for at = from, to, 4000 do
    done = done + redis.call('XACK', KEYS[1], 'trainer', unpack(ARGV, at, math.min(at + 3999, to)))
  end
  return done
end
local plain = 5 + tonumber(ARGV[5])
local done = settled(6, plain)
for i = plain + 1, #ARGV, 2 do
  local pending = settled(i, i)
  done = done + pending
  if pending == 1 then
    local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
    local payload = entry and entry[2][2] or ''
    redis.call('XADD', KEYS[4], 'MAXLEN', ARGV[2], '*', 'entry', ARGV[i], 'cause', ARGV[1], 'why', ARGV[i + 1],
      'size', #payload, 't', #payload <= tonumber(ARGV[3]) and payload or '')
  end
end
if ARGV[1] ~= '' then
  local ids = {}
  for i = 6, plain do ids[#ids + 1] = ARGV[i] end
  for i = plain + 1, #ARGV, 2 do ids[#ids + 1] = ARGV[i] end
  end_blobs(KEYS[5], ARGV[4], ids)
end
if done > 0 then
  if ARGV[1] == '' then redis.call('HINCRBY', KEYS[2], 'trained', done)
  else redis.call('HINCRBY', KEYS[3], ARGV[1], done) end
end
return done
"""
)

# ARGV: the oldest stream id that is kept, the beginning of the keys of blobs, stream ids before it that have one.
_TRIM = (
    END_BLOBS
    + """
local trimmed = redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
local ids = {}
for i = 3, #ARGV do ids[#ids + 1] = ARGV[i] end
if #ids > 0 then end_blobs(KEYS[2], ARGV[2], ids) end
return trimmed
"""
)


@dataclass(frozen=True)
class StreamEntry:
    """One undecoded entry: decoding may fail, and then the entry must still be settled by its id."""

    stream_id: str
    payload: bytes
    ref: bytes = b""
    """What it says of its blob (`services.wire.choices.BlobRef`); empty where it has none."""
    blob: bytes | None = None
    """The blob, where it was read and is there (`TrajectoryReader.with_blobs`)."""


class TrajectoryLog:
    """The stream as anybody may read it, without taking part in its consumption."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._key = RunKeys(run_id).stream

    async def after(self, stream_id: str, count: int) -> list[StreamEntry]:
        """Up to `count` entries that came after `stream_id`, oldest first. Those before the last trim are gone."""
        return _entries(await self._redis.xrange(self._key, min=f"({stream_id}", count=count))

    async def one(self, stream_id: str) -> StreamEntry | None:
        """The entry of this id; None where it was trimmed."""
        return next(iter(_entries(await self._redis.xrange(self._key, stream_id, stream_id))), None)


class TrajectoryReader:
    """The trainer's end: a consumer group of one name, read in order, settled by id."""

    def __init__(self, redis: Redis, run_id: str, consumer: str = "trainer-0") -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._consumer = consumer
        self._backlog_from: str | None = "0"
        self._entry_bytes = FIRST_ENTRY_BYTES
        self.caught_up = False
        """Whether the last read took all that was in the stream then."""
        self._settle = redis.register_script(_SETTLE)
        self._trim = redis.register_script(_TRIM)
        self._blobs = BlobStore(redis, run_id)

    async def open(self) -> None:
        """Create the consumer group at the stream's beginning unless it is there."""
        try:
            await self._redis.xgroup_create(self._keys.stream, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self, count: int, block_ms: int) -> list[StreamEntry]:
        """Up to `count` entries: first those that an earlier incarnation of this consumer left pending, then new ones.

        Waits at most `block_ms`, and never longer than LONGEST_BLOCK_MS, for a new one: the client takes a connection on
        which nothing comes for one that is cut. Large entries are read in answers of READ_BYTES, for the same reason.
        """
        count = max(1, min(count, READ_BYTES // self._entry_bytes))
        block_ms = min(block_ms, LONGEST_BLOCK_MS)
        if self._backlog_from is not None:
            entries = await self._read_from(self._backlog_from, count, None)
            if entries:
                self._backlog_from = entries[-1].stream_id
                return entries
            self._backlog_from = None
        entries = await self._read_from(">", count, block_ms)
        self.caught_up = len(entries) < count
        return entries

    async def _read_from(self, position: str, count: int, block_ms: int | None) -> list[StreamEntry]:
        reply = await self._redis.xreadgroup(
            GROUP, self._consumer, {self._keys.stream: position}, count=count, block=block_ms
        )
        found = [
            StreamEntry(stream_id=as_text(stream_id), payload=fields[b"t"], ref=fields.get(b"b", b""))
            for _, entries in _pairs(reply)
            for stream_id, fields in entries
            if fields
        ]
        if found:
            self._entry_bytes = max(1, sum(len(entry.payload) for entry in found) // len(found))
        return found

    async def fetch(self, stream_ids: Sequence[str]) -> list[StreamEntry]:
        """Entries by id, acknowledged or not, in the order asked for, with their blobs; trimmed ones are missing."""
        replies: list[Any] = []
        for at in range(0, len(stream_ids), FETCHED_AT_ONCE):
            async with self._redis.pipeline(transaction=False) as pipe:
                for stream_id in stream_ids[at : at + FETCHED_AT_ONCE]:
                    pipe.xrange(self._keys.stream, stream_id, stream_id)
                replies += await pipe.execute()
        return await self.with_blobs([entry for found in replies for entry in _entries(found)])

    async def with_blobs(self, entries: Sequence[StreamEntry]) -> list[StreamEntry]:
        """The same, each with its blob, as far as it has one and it is there."""
        found = list(entries)
        wanted: list[tuple[int, BlobRef]] = []
        for place, entry in enumerate(found):
            if entry.ref:
                try:
                    ref = read_reference(entry.ref)
                except BlobError:
                    continue  # said when it is judged
                if ref.name:
                    wanted.append((place, ref))
        if wanted:
            blobs = await self._blobs.read([ref for _, ref in wanted])
            for (place, _), blob in zip(wanted, blobs, strict=True):
                found[place] = replace(found[place], blob=blob)
        return found

    async def acknowledge_trained(self, stream_ids: Sequence[str]) -> int:
        """Settle entries whose gradient is durable; returns how many were still pending."""
        return await self._settle_as("", dict.fromkeys(stream_ids, ""))

    async def acknowledge_dropped(self, cause: str, stream_ids: Sequence[str] | Mapping[str, str]) -> int:
        """Settle entries that will never be trained, counted under `cause`.

        Where they are given with the reason of each, they become dead letters.
        """
        if not cause:
            raise ValueError("a drop needs a cause")
        reasons = stream_ids if isinstance(stream_ids, Mapping) else dict.fromkeys(stream_ids, "")
        return await self._settle_as(cause, reasons)

    async def _settle_as(self, cause: str, reasons: Mapping[str, str]) -> int:
        if not reasons:
            return 0
        keys = [self._keys.stream, self._keys.accounts, self._keys.dropped, self._keys.dead, self._keys.blobs]
        plain = [stream_id for stream_id, why in reasons.items() if not why]
        arguments: list[str | int] = [cause, KEPT, LARGEST, self._keys.blob(""), len(plain), *plain]
        for stream_id, why in reasons.items():
            if why:
                arguments += [stream_id, why]
        return int(await self._settle(keys=keys, args=arguments))

    async def pending(self) -> int:
        """Entries delivered and not yet settled."""
        summary = await self._summary()
        if summary is None:
            return 0
        return int(summary["pending"] if isinstance(summary, Mapping) else summary[0])

    async def oldest_pending(self) -> str | None:
        """The oldest entry that is delivered and not yet settled."""
        summary = await self._summary()
        if summary is None:
            return None
        oldest = summary["min"] if isinstance(summary, Mapping) else summary[1]
        return None if oldest is None else as_text(oldest)

    async def _summary(self) -> Any:
        """XPENDING's reply; None where the consumer group is gone."""
        try:
            return await self._redis.xpending(self._keys.stream, GROUP)
        except ResponseError as error:
            if is_gone(error):
                return None
            raise

    async def trim_before(self, stream_id: str) -> int:
        """Delete entries older than `stream_id`, with their blobs; call it when a checkpoint holds all of them."""
        have_blobs = map(as_text, await self._redis.hkeys(self._keys.blobs))
        ended = [each for each in have_blobs if stream_order(each) < stream_order(stream_id)]
        keys, arguments = [self._keys.stream, self._keys.blobs], [stream_id, self._keys.blob(""), *ended]
        return int(await self._trim(keys=keys, args=arguments))


def is_gone(error: RedisError) -> bool:
    """Whether the stream or its consumer group is gone: Redis has lost them. `TrajectoryReader.open` makes them again."""
    return isinstance(error, ResponseError) and str(error).startswith("NOGROUP")


def stream_order(stream_id: str) -> tuple[int, int]:
    """By which entries of the stream are ordered."""
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def _entries(reply: object) -> list[StreamEntry]:
    """XRANGE's reply."""
    found = cast("list[tuple[bytes, dict[bytes, bytes]]]", reply or [])
    return [StreamEntry(as_text(stream_id), fields[b"t"], fields.get(b"b", b"")) for stream_id, fields in found]


def _pairs(reply: object) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """XREADGROUP's reply in one shape: redis-py answers lists under RESP2 and mappings under RESP3."""
    if not reply:
        return []
    if isinstance(reply, Mapping):
        return [(key, [tuple(e) for batch in value for e in batch]) for key, value in reply.items()]
    assert isinstance(reply, list)
    return [(key, [tuple(entry) for entry in entries]) for key, entries in reply]


KEPT = 512
"""Letters a run keeps: with LARGEST, at most 32 MiB."""
LARGEST = 64 << 10
"""Bytes of an entry that its letter carries whole; of a larger one it tells the size alone."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that was taken from the stream and never trained, with the reason.

        stream entry ──settled as dropped, with a reason──► counted by cause (all)  +  dead letter (the newest KEPT)

    Written by the script that settles the entry, so that a drop that is counted has its letter. What is left over when a
    run concludes is no dead letter: nothing was wrong with it.

    `entry`: its id in the trajectory stream. `cause`: what it is counted under; `why`: in words, with the values.
    """

    entry: str
    cause: str
    why: str
    settled_at: float
    """Unix seconds."""
    size: int
    """Bytes of the entry."""
    payload: bytes
    """The entry as it was read; empty where it was larger than LARGEST."""


class DeadLetters:
    """A run's dead letters, for people. Each method is one round trip."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._key = RunKeys(run_id).dead

    async def newest(self, count: int) -> list[DeadLetter]:
        """Up to `count` of them, the newest first."""
        reply = await self._redis.xrevrange(self._key, count=count)
        found = cast("list[tuple[bytes, dict[bytes, bytes]]]", reply or [])
        return [_letter(as_text(letter_id), fields) for letter_id, fields in found]


def _letter(letter_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        entry=as_text(fields[b"entry"]),
        cause=as_text(fields[b"cause"]),
        why=as_text(fields[b"why"]),
        settled_at=int(letter_id.partition("-")[0]) / 1000,
        size=int(fields[b"size"]),
        payload=fields[b"t"],
    )
