"""Retries and failover: a call is sent to one server after another until one answers it.

    choose ──► try ──answered──► done
      ▲         └─ failed: the next server, at once; the one that a 421 names first
      └── back off (0.05 s, twice as long each time, at most 1 s) when every server has been tried ──► … ──► give up

A call carries the same `x-rollmesh-call` on every try, so a server generates its answer once, whichever tries reach it.

A call under which servers were lost as soon as it had come is refused (`services.policies.blame`), and its sessions are
aborted: a client that sends it again finds them ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

import msgspec
import structlog
from aiohttp import ClientResponse

from services.gateway.request import ProxiedCall
from services.gateway.router import Destination, Router
from services.gateway.servers import Server, Servers
from services.gateway.upstream import TryFailedError, Upstream
from services.policies.backoff import growing_delay
from services.policies.blame import Blame, quarantine_s
from services.wire.errors import UNDECODABLE, DeadlineError, NotReadyError, RollmeshError, StallsServersError
from services.wire.gateway_api import CALL_HEADER

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

Handle = Callable[[Server, ClientResponse], Awaitable[None]]
"""Takes an answer to the agent. Raises TryFailedError where another try must go on with it."""

_log = structlog.get_logger()


class Failover:
    """Tries servers for calls."""

    def __init__(
        self, servers: Servers, router: Router, upstream: Upstream, timeout_s: float, agent_key: str | None = None
    ) -> None:
        """`agent_key`: with which sessions are aborted."""
        self._servers = servers
        self._router = router
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._agent_key = agent_key
        self._quarantine = asyncio.Lock()
        self._aborting: set[asyncio.Task[None]] = set()
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
        for the whole time that failing over may take, StallsServersError for a call that is to blame for lost servers.
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
                if not tries.blame.may_go_on:
                    raise self._refuse(call, tries) from failure
                await self._hold(call, failure)
                owner = self._owner(failure, destination, tries)
            else:
                if response.status < 400:
                    self._router.held_by(destination, server)
                return

    async def aclose(self) -> None:
        """Stop aborting sessions."""
        for task in self._aborting:
            task.cancel()
        await asyncio.gather(*self._aborting, return_exceptions=True)

    async def _hold(self, call: ProxiedCall, failure: TryFailedError) -> None:
        """Keep a large suspect until others have settled where they are now; one at a time."""
        held_s = quarantine_s(failure.loss, len(call.body))
        if held_s:
            _log.warning("waiting", waiting_for="the other calls to settle", call=call.call_id, bytes=len(call.body))
            async with self._quarantine:
                await asyncio.sleep(held_s)

    def _refuse(self, call: ProxiedCall, tries: _Tries) -> StallsServersError:
        refused = StallsServersError(f"{call.method} {call.path} of {len(call.body)} bytes", tries.told())
        _log.error("call refused", call=call.call_id, session=call.session_id, why=refused.what)
        for session_id in sessions_of(call):
            task = asyncio.create_task(self._abort(call, session_id), name=f"abort {session_id}")
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        return refused

    async def _abort(self, call: ProxiedCall, session_id: str) -> None:
        path, call_id = f"/sessions/{session_id}/abort", secrets.token_hex(16)
        key = [] if self._agent_key is None else [("authorization", f"Bearer {self._agent_key}")]
        abort = replace(
            call,
            method="POST",
            path=path,
            target=path,
            headers=[*key, (CALL_HEADER, call_id)],
            body=b"",
            call_id=call_id,
            session_id=session_id,
            group_id=None,
        )

        async def note(server: Server, response: ClientResponse) -> None:
            _log.info("session aborted", session=session_id, server=server.name, status=response.status)

        try:
            await self.deliver(abort, note, lambda: 0)
        except RollmeshError as error:
            _log.warning("a session was not aborted: it will expire", session=session_id, why=error.what)

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
        self.blame = Blame()
        self._lost: set[str] = set()
        """Incarnations that were counted."""

    def note(self, server: Server, failure: TryFailedError, call: ProxiedCall) -> bool:
        """Returns whether the agent got something from this try."""
        progressed = self._progress() > self._seen
        if progressed:
            # Only the time without progress is bounded.
            self._seen, self._ends, self._pauses = self._progress(), None, 0
        if self._ends is None:
            self._ends = time.monotonic() + self._timeout_s
        self.failed.add(server.name)
        # A connection that breaks again and again to a process that lives is the network's, not this call's.
        if failure.loss is not None and server.record.incarnation not in self._lost:
            self._lost.add(server.record.incarnation)
            self.blame = self.blame.after(failure.loss)
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
        return DeadlineError(f"{what} ({self.told()})", "see GET /admin/servers and the servers' logs")

    def told(self) -> str:
        """What each server said last."""
        return "; ".join(f"{name}: {why}" for name, why in sorted(self._why.items()))


class _Turn(msgspec.Struct):
    session_id: str


class _Turns(msgspec.Struct):
    turns: list[_Turn]


_turns = msgspec.json.Decoder(_Turns)


def sessions_of(call: ProxiedCall) -> list[str]:
    """The sessions that a call was made in: that which it names, or those whose turns it takes."""
    if call.session_id is not None:
        return [call.session_id]
    if call.group_id is None:
        return []
    try:
        return [turn.session_id for turn in _turns.decode(call.body).turns]
    except UNDECODABLE:
        return []
