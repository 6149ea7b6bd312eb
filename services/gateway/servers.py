"""Service discovery and load of rollout servers, as one gateway sees them: their heartbeats, and its own calls.

registry ──every poll_s──► records ──► serving | draining          new work goes to those that serve
                             └── the lease ran out ──► gone         what is in flight there is sent elsewhere at once

While Redis fails the last view is kept: that a server is gone then shows in its connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from redis.exceptions import RedisError

from services.gateway.request import ProxiedCall
from services.policies.routing import HeartbeatDelta
from services.run_store.discovery import Listed, ServerRecord, ServiceRegistry
from services.run_store.status import WaitBoard
from services.security.addresses import AddressRefusedError, check_url
from services.wire.errors import UNDECODABLE

_REDIS_WITHIN_S = 2.0
_FORGIVEN_S = 10.0
"""After the registry failed: a lease that runs out is no sign of a server that stands still."""
AVOIDED_S = 1.0
"""How long a server that refuses connections gets no work while others do."""

_log = structlog.get_logger()


class Server:
    """One server. `in_flight`: calls that generate and that this gateway has sent it."""

    def __init__(self, record: ServerRecord) -> None:
        self.record = record
        self._calls = HeartbeatDelta()
        self._open = HeartbeatDelta()
        """Sessions that were opened through this gateway, less those that it saw end."""
        self._opening = 0
        self._avoided_until = 0.0
        self.heard = time.monotonic()
        """When it was last heard of, on the monotonic clock: not later than it really was, but for the first time."""
        self.stands_still = False
        """It was lost because its lease ran out, not because it ended."""
        self._tries: set[asyncio.Timeout] = set()

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def in_flight(self) -> int:
        return self._calls.count

    @property
    def busy(self) -> int:
        """Calls that run or wait there: as of its last heartbeat, and what this gateway started or ended since."""
        reported = self.record.running + self.record.waiting
        return max(self.in_flight, reported + self._calls.delta)

    @property
    def sessions(self) -> int:
        """Open sessions: as of its last heartbeat, opened and ended through this gateway since, and about to be opened."""
        return max(self.record.open_sessions + self._open.delta, 0) + self._opening

    def renew(self, record: ServerRecord, at: float) -> None:
        """Take the record of its latest heartbeat. `at`: when that was, on the monotonic clock.

        What changed is counted from the heartbeat on, not from when its record was read: of a batch that ended in between,
        the record still tells, and all of the next batch would go to another server.
        """
        self.record = record
        self._calls.rebase(at)
        self._open.rebase(at)

    def sessions_changed(self, by: int) -> None:
        """It has answered that it opened, or below 0 ended, so many sessions."""
        self._open.add(by, time.monotonic())

    def avoid(self) -> None:
        """It refused a connection."""
        self._avoided_until = time.monotonic() + AVOIDED_S

    def is_avoided(self, now: float) -> bool:
        return now < self._avoided_until

    @contextmanager
    def trying(self, limit: asyncio.Timeout, call: ProxiedCall) -> Iterator[None]:
        """The call is on its way there; `limit` passes at once when the server is gone."""
        generates, opens = call.generates, call.opens
        if generates:
            self._calls.add(1, time.monotonic())
        self._opening += opens
        self._tries.add(limit)
        try:
            yield
        finally:
            self._tries.discard(limit)
            if generates:
                self._calls.add(-1, time.monotonic())
            self._opening -= opens

    def gone(self, *, stands_still: bool) -> None:
        """Its lease ran out (it may stand still), or another process took its name: calls stop waiting for it."""
        self.stands_still = stands_still
        now = asyncio.get_running_loop().time()
        for limit in self._tries:
            limit.reschedule(now)


class Servers:
    """The known servers. `run` polls the registry until cancelled."""

    def __init__(self, registry: ServiceRegistry, board: WaitBoard, poll_s: float) -> None:
        self._registry = registry
        self._board = board
        self._poll_s = poll_s
        self._known: dict[str, Server] = {}
        self._failing_since: float | None = None
        self._refreshed = False
        self._refused: set[str] = set()
        """The addresses of the last view that are not called."""
        self._last_heard: dict[str, float] = {}
        """By server, by the clock of Redis."""
        self._asked_before = time.monotonic()
        self._failed_until = float("-inf")

    def all(self) -> list[Server]:
        """All that are alive, by name."""
        return [self._known[name] for name in sorted(self._known)]

    def serving(self) -> list[Server]:
        """Those that take work, by name; those that refuse connections only where there is no other."""
        now = time.monotonic()
        serving = [server for server in self.all() if server.record.state == "serving"]
        return [server for server in serving if not server.is_avoided(now)] or serving

    def named(self, server_id: str) -> Server | None:
        return self._known.get(server_id)

    def at(self, url: str) -> Server | None:
        """The server at an address; None for an address of none."""
        return next((server for server in self._known.values() if server.record.url == url), None)

    def not_ready(self) -> list[str]:
        """Why the gateway cannot do its work; nothing when it can."""
        reasons = []
        if self._failing_since is not None:
            since = time.monotonic() - self._failing_since
            reasons.append(f"the registry cannot be read for {since:.1f} s: servers may have come or gone")
        if not any(server.record.state == "serving" for server in self._known.values()):
            reasons.append("no rollout server is serving" if self._refreshed else "looking for rollout servers")
        return reasons

    async def run(self) -> None:
        """Poll the registry, and post on the wait board while no server takes calls."""
        waiting = False
        try:
            while True:
                await self.refresh()
                lacking = not self.serving()
                if lacking != waiting and self._failing_since is None:
                    waiting = await self._say(lacking)
                await asyncio.sleep(self._poll_s)
        finally:
            if waiting:
                await self._say(False)

    async def refresh(self) -> None:
        """Read the registry once; where that fails the last view is kept."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(_REDIS_WITHIN_S):
                listed = await self._registry.services()
        except (RedisError, OSError, TimeoutError, *UNDECODABLE) as error:
            if self._failing_since is None:
                self._failing_since = time.monotonic()
                _log.warning("the registry cannot be read: the last view of the servers stands", error=repr(error))
            return
        if self._failing_since is not None:
            self._failed_until = asked
            _log.info("the registry can be read again", after_s=round(time.monotonic() - self._failing_since, 1))
        self._failing_since, self._refreshed = None, True
        self._take(listed, asked, failed=asked - self._failed_until < _FORGIVEN_S)
        self._asked_before = asked

    def _take(self, listed: list[Listed], asked: float, *, failed: bool) -> None:
        """`asked`: when, on the monotonic clock. `failed`: the registry could not be read lately, so leases run out of
        servers that do not stand still."""
        servers = {each.record.name: each for each in listed if isinstance(each.record, ServerRecord)}
        alive = [each.record for each in servers.values() if each.alive and isinstance(each.record, ServerRecord)]
        seen = {record.name: record for record in self._callable(alive)}
        for name, server in list(self._known.items()):
            record = seen.get(name)
            if record is not None and record.incarnation == server.record.incarnation:
                if record.state != server.record.state:
                    _log.info("rollout server changed", server=name, state=record.state)
                server.renew(record, asked - servers[name].age_s)
                if servers[name].last_heard != self._last_heard.get(name):
                    server.heard = self._asked_before
                continue
            del self._known[name]
            late = servers.get(name)
            expired = late is not None and late.record.incarnation == server.record.incarnation
            server.gone(stands_still=expired and not failed)
            _log.warning("rollout server gone", server=name, url=server.record.url)
        for name, record in seen.items():
            if name not in self._known:
                self._known[name] = Server(record)
                _log.info("rollout server found", server=name, url=record.url, state=record.state)
        self._last_heard = {name: each.last_heard for name, each in servers.items()}

    def _callable(self, records: list[ServerRecord]) -> list[ServerRecord]:
        """Those to which agents' calls, and the keys in them, may go; of the others it is said why, once."""
        refused: dict[str, AddressRefusedError] = {}
        for record in records:
            try:
                check_url(record.url)
            except AddressRefusedError as error:
                refused[record.url] = error
        for url in refused.keys() - self._refused:
            _log.warning("rollout server not taken", url=url, why=str(refused[url]))
        self._refused = set(refused)
        return [record for record in records if record.url not in refused]

    async def _say(self, lacking: bool) -> bool:
        """Post or clear the wait; returns whether it stands on the board."""
        try:
            async with asyncio.timeout(_REDIS_WITHIN_S):
                written = await (
                    self._board.post("a rollout server that takes calls") if lacking else self._board.clear()
                )
        except TimeoutError:
            written = False
        return lacking if written else not lacking
