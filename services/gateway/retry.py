"""Retries and failover: a call is sent to one server after another until one answers it.

    choose ──► try ──answered──► done
      ▲         └─ failed: the next server, at once; the one that a 421 names first
      └── back off (0.05 s, twice as long each time, at most 1 s) when every server has been tried ──► … ──► give up

A call carries the same `x-rollmesh-call` on every try, so a server generates its answer once, whichever tries reach it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

import structlog
from aiohttp import ClientResponse

from services.gateway.request import ProxiedCall
from services.gateway.router import Destination, Router
from services.gateway.servers import Server, Servers
from services.gateway.upstream import TryFailedError, Upstream
from services.policies.backoff import growing_delay
from services.wire.errors import DeadlineError, NotReadyError, RollmeshError

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

Handle = Callable[[Server, ClientResponse], Awaitable[None]]
"""Takes an answer to the agent. Raises TryFailedError where another try must go on with it."""

_log = structlog.get_logger()


class Failover:
    """Tries servers for calls."""

    def __init__(self, servers: Servers, router: Router, upstream: Upstream, timeout_s: float) -> None:
        self._servers = servers
        self._router = router
        self._upstream = upstream
        self._timeout_s = timeout_s
        self.failed_tries: Counter[str] = Counter()
        """By server; those whose calls were given up are counted too."""

    async def deliver(
        self,
        call: ProxiedCall,
        handle: Handle,
        progress: Callable[[], int],
        *,
        apart_from: Collection[str] = (),
        resend: bool = True,
    ) -> None:
        """Have `handle` take an answer to `call`. `progress` grows whenever the agent gets something.

        `apart_from`: servers that come last. `resend`: whether the call can be sent again once there was progress; where
        not, what broke it off is raised as TryFailedError. Raises NotReadyError or DeadlineError when nothing came forth
        for the whole time that failing over may take.
        """
        destination = self._router.destination(call)
        tries = _Tries(self._timeout_s, progress, apart_from)
        owner: Server | None = None
        while True:
            server = owner or self._router.choose(call, destination, tries.failed)
            if server is None:
                await tries.pause(call)
                continue
            owner = None
            try:
                async with self._upstream.sending(server, call) as response:
                    await handle(server, response)
            except TryFailedError as failure:
                failure.server_id = server.name
                self.failed_tries[server.name] += 1
                if tries.note(server, failure, call) and not resend:
                    raise
                owner = self._owner(failure, destination, tries)
            else:
                if response.status < 400:
                    self._router.held_by(destination, server)
                return

    def _owner(self, failure: TryFailedError, destination: Destination, tries: _Tries) -> Server | None:
        """The server that a failed try names as the holder, if it is known and was not tried in this round."""
        owner = None if failure.owner_url is None else self._servers.at(failure.owner_url)
        if owner is None or owner.name in tries.failed:
            return None
        self._router.held_by(destination, owner)
        return owner


class _Tries:
    """What has been tried for one call. `failed`: the servers that failed since the last pause."""

    def __init__(self, timeout_s: float, progress: Callable[[], int], apart_from: Collection[str]) -> None:
        self.failed = set(apart_from)
        self._timeout_s = timeout_s
        self._progress = progress
        self._seen = progress()
        self._ends: float | None = None
        self._pauses = 0
        self._why: dict[str, str] = {}

    def note(self, server: Server, failure: TryFailedError, call: ProxiedCall) -> bool:
        """Returns whether the agent got something from this try."""
        progressed = self._progress() > self._seen
        if progressed:
            # Only the time without progress is bounded.
            self._seen, self._ends, self._pauses = self._progress(), None, 0
        if self._ends is None:
            self._ends = time.monotonic() + self._timeout_s
        self.failed.add(server.name)
        if self._why.get(server.name) != failure.what:
            self._why[server.name] = failure.what
            _log.info("sent again", call=call.call_id, path=call.path, server=server.name, why=failure.what)
        return progressed

    async def pause(self, call: ProxiedCall) -> None:
        """Wait before all servers are tried anew. Raises NotReadyError or DeadlineError when the time is up."""
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + self._timeout_s
        if now >= self._ends:
            raise self._gave_up(call)
        self._pauses += 1
        if self._pauses == 1:
            _log.warning("waiting", waiting_for="a rollout server that takes the call", call=call.call_id)
        await asyncio.sleep(min(growing_delay(self._pauses, _FIRST_PAUSE_S, _LONGEST_PAUSE_S), self._ends - now))
        self.failed.clear()

    def _gave_up(self, call: ProxiedCall) -> RollmeshError:
        what = f"no rollout server took {call.method} {call.path} within {self._timeout_s:g} s"
        if not self._why:
            return NotReadyError(f"{what}: none is serving", "see GET /admin/servers and the servers' logs")
        said = "; ".join(f"{name}: {why}" for name, why in sorted(self._why.items()))
        return DeadlineError(f"{what} ({said})", "see GET /admin/servers and the servers' logs")
