"""Service registry: which services a run has, where they are, and which of them are alive, all in Redis.

    announce ──every second──► alive for LEASE_S ──the lease runs out──► dead, still listed ──10 minutes──► forgotten
        └── the service ends ──► withdrawn

Rollout servers also say what they serve and how busy they are. A service that cannot reach Redis (the weight bus) is
announced by one that knows its address (`told_by`): nothing follows from its lease then, it must be asked.

A hash holds the records, a sorted set when each was last heard of, by the clock of Redis: all are read at one moment.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.run_store.client import as_text
from services.run_store.keys import RunKeys

LEASE_S = 3.0
HEARTBEATS_A_LEASE = 3
FORGOTTEN_AFTER_S = 600.0
_WITHDRAW_WITHIN_S = 1.0

ServiceKind = Literal["rollout-server", "gateway", "weight-bus", "rewards", "trainer"]
ServerState = Literal["serving", "draining"]

_log = structlog.get_logger()

# ARGV: how long services are remembered (ms), then name and record of each. Who has been dead for longer is removed, with
# what it posted on the wait board. Answers what Redis says of itself, '' for what this user may not ask.
_ANNOUNCE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[2], now, ARGV[i])
end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[1])) do
  redis.call('HDEL', KEYS[1], name)
  redis.call('HDEL', KEYS[3], name)
  redis.call('ZREM', KEYS[2], name)
end
local function told(text, pattern) return type(text) == 'string' and string.match(text, pattern) or '' end
local memory = redis.pcall('INFO', 'memory')
return {told(redis.pcall('INFO', 'server'), 'run_id:(%w+)'), told(memory, 'used_memory:(%d+)'),
  told(memory, 'maxmemory:(%d+)')}
"""

# ARGV: name and incarnation of each. A later incarnation's record is not the earlier one's to take away.
_WITHDRAW = """
local count = 0
for i = 1, #ARGV, 2 do
  local found = redis.call('HGET', KEYS[1], ARGV[i])
  if found and cjson.decode(found).incarnation == ARGV[i + 1] then
    redis.call('HDEL', KEYS[1], ARGV[i])
    redis.call('ZREM', KEYS[2], ARGV[i])
    count = count + 1
  end
end
return count
"""

# Names and records, names and when they were heard of (ms), the time: each in turn.
_READ = """
return {redis.call('HGETALL', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES'), redis.call('TIME')}
"""


@dataclass(frozen=True)
class StoreState:
    """What Redis says of itself at a heartbeat; empty or 0 where it does not tell.

    `process`: its run id, another one after each start. `used_bytes`: of all its keys, other runs' too. `most_bytes`: its
    `maxmemory`, 0 for none.
    """

    process: str
    used_bytes: int
    most_bytes: int


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One service. `url`: where its probes are. `told_by`: who announces it, where it does not do so itself."""

    name: str
    kind: ServiceKind
    url: str
    incarnation: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Random, chosen at each start: a service that starts again under its name does not hold what the old one held."""
    told_by: str | None = None
    lease_s: float = LEASE_S


class ServerRecord(ServiceRecord, frozen=True, kw_only=True):
    """A rollout server as it describes itself. `url`: where agents and other services reach it."""

    kind: ServiceKind = "rollout-server"
    state: ServerState
    model: str
    policy_version: int
    kv_policy: str = "keep"
    running: int = 0
    """Samples being generated."""
    waiting: int = 0
    """Requests that wait for a place."""
    max_running: int = 0
    """Samples that it generates at once."""
    kv_use: float | None = None
    """Share of the memory for keys and values that running samples hold; None where its engine does not tell."""
    open_sessions: int = 0
    sampled_tokens: int = 0
    """Since it started."""
    store_used: int = 0
    """Bytes that Redis held at the heartbeat before; 0 where nothing is closed by it."""
    store_most: int = 0
    """From how many on it admits no group."""


def weight_bus_record(url: str, told_by: str) -> ServiceRecord:
    """The run's bus, which speaks to no Redis; every service that knows its address tells the same."""
    return ServiceRecord(name="weight-bus", kind="weight-bus", url=url, told_by=told_by)


class Listed(msgspec.Struct, frozen=True):
    """A record, whether its lease lasts, and when it was last announced (Unix seconds, by the clock of Redis).

    `age_s`: seconds from then to the moment when Redis was asked.
    """

    record: ServiceRecord
    alive: bool
    last_heard: float
    age_s: float = 0.0


_service = msgspec.json.Decoder(ServiceRecord)
_server = msgspec.json.Decoder(ServerRecord)


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _decode(packed: bytes) -> ServiceRecord:
    record = _service.decode(packed)
    return _server.decode(packed) if record.kind == "rollout-server" else record


class ServiceRegistry:
    """The services of one run. All methods raise RedisError."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        keys = RunKeys(run_id)
        self._keys = [keys.services, keys.service_heartbeats]
        self._waits = keys.waits
        self._announce, self._withdraw = redis.register_script(_ANNOUNCE), redis.register_script(_WITHDRAW)
        self._read = redis.register_script(_READ)

    async def announce(self, records: Sequence[ServiceRecord]) -> StoreState:
        """These are alive, from now on for as long as their leases."""
        named = [part for record in records for part in (record.name, msgspec.json.encode(record))]
        arguments = [round(FORGOTTEN_AFTER_S * 1000), *named]
        process, used, most = await self._announce(keys=[*self._keys, self._waits], args=arguments)
        return StoreState(as_text(process), int(used or 0), int(most or 0))

    async def withdraw(self, records: Sequence[ServiceRecord]) -> int:
        """These have ended; returns how many of their records were still there."""
        named = [part for record in records for part in (record.name, record.incarnation)]
        return int(await self._withdraw(keys=self._keys, args=named))

    async def services(self) -> list[Listed]:
        """All that are alive or were not long ago, by name."""
        records, heard, (seconds, microseconds) = await self._read(keys=self._keys)
        now = int(seconds) + int(microseconds) / 1e6
        packed = dict(_pairs(records))
        return [
            Listed(record, now - at < record.lease_s, at, now - at)
            for name, at in sorted((name, float(milliseconds) / 1e3) for name, milliseconds in _pairs(heard))
            if name in packed and now - at < FORGOTTEN_AFTER_S
            for record in [_decode(packed[name])]
        ]

    async def servers(self) -> list[ServerRecord]:
        """The rollout servers that are alive, by name."""
        return [each.record for each in await self.services() if each.alive and isinstance(each.record, ServerRecord)]


class Heartbeat:
    """Announces what `describe` gives, a few times a lease and at once after `notify`. `run` is a task of the owner."""

    def __init__(self, registry: ServiceRegistry, describe: Callable[[], Sequence[ServiceRecord]]) -> None:
        self._registry = registry
        self._describe = describe
        self._wake = asyncio.Event()
        self.store: StoreState | None = None
        """As of the last heartbeat; None before the first."""

    def notify(self) -> None:
        """Something that others should know at once has changed."""
        self._wake.set()

    async def announce(self) -> None:
        """Raises RedisError."""
        self.store = await self._registry.announce(self._describe())

    async def run(self) -> None:
        """Announce until cancelled. A Redis that is away is tried again; meanwhile the lease may run out."""
        failing = False
        while True:
            self._wake.clear()
            try:
                await self.announce()
                failing = False
            except (RedisError, OSError) as error:
                if not failing:
                    _log.warning("cannot announce this service", why=repr(error))
                failing = True
            with suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S / HEARTBEATS_A_LEASE):
                    await self._wake.wait()

    async def withdraw(self) -> None:
        """The services have ended. Raises RedisError."""
        await self._registry.withdraw(self._describe())


@asynccontextmanager
async def announced(redis: Redis, run_id: str, *records: ServiceRecord) -> AsyncIterator[Heartbeat]:
    """Heartbeats for the records while the block lasts. A Redis that is away is tried again: the service goes on."""
    heartbeat = Heartbeat(ServiceRegistry(redis, run_id), lambda: records)
    running = asyncio.create_task(heartbeat.run(), name="heartbeat")
    try:
        yield heartbeat
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        try:
            async with asyncio.timeout(_WITHDRAW_WITHIN_S):
                await heartbeat.withdraw()
        except (RedisError, OSError, TimeoutError) as error:
            _log.warning("could not withdraw from the service registry", why=repr(error))
