"""The directory: which services a run has or had, and where, so that Redis alone is enough to find them all.

    announced ──every second──► alive for LEASE_S ──the lease runs out──► silent ──10 minutes──► forgotten
        └── the service ends ──► withdrawn

A service that cannot reach Redis (the weight bus) is entered by one that knows its address: nothing follows from a lease
then, it must be asked. What rollout servers are fit for stands in the registry (`services.run_store.discovery`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.run_store.client import as_text
from services.run_store.keys import RunKeys

LEASE_S = 3.0
EVERY_S = 1.0
FORGOTTEN_AFTER_S = 600.0
_WITHDRAW_WITHIN_S = 1.0

ServiceKind = Literal["rollout-server", "gateway", "weight-bus", "rewards", "trainer"]

_log = structlog.get_logger()


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One service. `url`: where its probes are. `told_by`: who entered it, where it did not do so itself."""

    name: str
    kind: ServiceKind
    url: str
    told_by: str | None = None
    at: float = 0.0
    """Unix seconds of the last announcement, by the clock of who made it."""


class Listed(msgspec.Struct, frozen=True):
    """A record, and whether its lease lasts."""

    record: ServiceRecord
    alive: bool


class Directory:
    """The services of one run."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)

    async def announce(self, records: Sequence[ServiceRecord]) -> None:
        """These are alive for LEASE_S more seconds. Raises RedisError."""
        now = time.time()
        async with self._redis.pipeline(transaction=True) as pipe:
            for record in records:
                stamped = msgspec.structs.replace(record, at=now)
                pipe.hset(self._keys.services, record.name, msgspec.json.encode(stamped))
                pipe.set(self._keys.service_lease(record.name), "1", px=round(LEASE_S * 1000))
            await pipe.execute()

    async def withdraw(self, records: Sequence[ServiceRecord]) -> None:
        """These have ended in good order. Raises RedisError."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for record in records:
                pipe.hdel(self._keys.services, record.name)
                pipe.delete(self._keys.service_lease(record.name))
            await pipe.execute()

    async def services(self) -> list[Listed]:
        """All that are alive or were not long ago, by name. Raises RedisError."""
        found = await self._redis.hgetall(self._keys.services)
        if not found:
            return []
        names = sorted(as_text(name) for name in found)
        leases = await self._redis.mget([self._keys.service_lease(name) for name in names])
        records = {as_text(name): msgspec.json.decode(packed, type=ServiceRecord) for name, packed in found.items()}
        listed = [Listed(records[name], lease is not None) for name, lease in zip(names, leases, strict=True)]
        oldest = time.time() - FORGOTTEN_AFTER_S
        return [each for each in listed if each.alive or each.record.at > oldest]


@asynccontextmanager
async def announced(redis: Redis, run_id: str, *records: ServiceRecord) -> AsyncIterator[None]:
    """The records are announced while the block lasts. A Redis that is away is tried again: the service goes on."""
    directory = Directory(redis, run_id)
    sending_heartbeats = asyncio.create_task(_keep_sending(directory, records), name="directory")
    try:
        yield
    finally:
        sending_heartbeats.cancel()
        with suppress(asyncio.CancelledError):
            await sending_heartbeats
        try:
            async with asyncio.timeout(_WITHDRAW_WITHIN_S):
                await directory.withdraw(records)
        except (RedisError, OSError, TimeoutError) as error:
            _log.warning("could not withdraw from the directory", why=repr(error))


async def _keep_sending(directory: Directory, records: Sequence[ServiceRecord]) -> None:
    failing = False
    while True:
        try:
            await directory.announce(records)
            failing = False
        except (RedisError, OSError) as error:
            if not failing:
                _log.warning("cannot announce this service in the directory", why=repr(error))
            failing = True
        await asyncio.sleep(EVERY_S)


# The registry: which rollout servers of a run are alive, what they serve and how busy they are, each for a lease.
#
#     announce ──► alive for lease_s ──announce──► alive …          a server says so itself, three times a lease
#                      │ withdraw | the lease runs out
#                      ▼
#                    gone
#
# A server that starts again under the same name is another `incarnation`: what the old one held is not its own.

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
    """Random, chosen at each start."""
    url: str
    state: ServerState
    model: str
    policy_version: int
    kv_policy: str = "keep"
    running: int = 0
    """Samples being sampled."""
    waiting: int = 0
    """Requests that wait for a place."""
    max_running: int = 0
    """Samples that it generates at once."""
    open_sessions: int = 0
    sampled_tokens: int = msgspec.field(default=0, name="drawn_tokens")
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
