"""The lease of this runner: taken before its first group, renewed by a thread, given back at its end.

    join ──► [ heartbeat every quarter of a lease ] ──► leave           servers give the groups of one that is silent up
                   └── another process has joined under this name: the runner ends

The thread is there for environments whose code holds the event loop up (a long judgement): they live all the same.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from clients.rollout.calls import LEASE_TIMEOUT_S
from clients.rollout.client import RolloutClient
from clients.rollout.transport import ServerUnreachableError
from services.security.tls import Trust
from services.wire.errors import ConflictError, NotReadyError, RollmeshError, UsageError
from services.wire.rollout_api import Runner, RunnerLease

_BEATS_A_LEASE = 4
_AGAIN_S = 0.25
_LEAVE_S = 1.0

_log = structlog.get_logger()
T = TypeVar("T")


def new_runner(name: str | None) -> Runner:
    """This process under `name`, or under a name that no other has. Raises UsageError for one that cannot be used."""
    host = re.sub("[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:32] or "host"
    name = name or f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        return Runner(name=name, incarnation=secrets.token_hex(8))
    except ValidationError as error:
        raise UsageError(f"{name!r} is no name of a runner", "give 1 to 64 letters, digits, '.', '_' or '-'") from error


class Lease:
    """An async context manager: the runner has its lease in the block. Heartbeats go to whichever address answers."""

    def __init__(self, runner: Runner, clients: Sequence[RolloutClient], api_key: str | None, trust: Trust) -> None:
        self.runner = runner
        self._clients = clients
        self._api_key = api_key
        self._trust = trust
        self._over = threading.Event()

    async def __aenter__(self) -> Lease:
        # Here, and not by the thread: a module that two threads begin to import may be seen half made by one of them.
        from clients.rollout.sync_client import SyncRolloutClient

        self._blocking = SyncRolloutClient
        self._lease_s = (await self._join()).lease_s
        self._loop = asyncio.get_running_loop()
        self._taken: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._renew, name="runner lease", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._clients[0].leave_runner(self.runner)
        except (RollmeshError, TimeoutError) as error:
            _log.info("the lease ends by itself", runner=self.runner.runner_id, why=str(error) or "no answer")
        await asyncio.to_thread(self._thread.join, 2 * LEASE_TIMEOUT_S)
        self._taken.cancel()

    async def while_held(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Where another process takes the name it is cancelled first: raises ConflictError."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self._taken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._taken.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _join(self) -> RunnerLease:
        for client in self._clients[:-1]:
            try:
                return await client.join_runner(self.runner)
            except (ServerUnreachableError, NotReadyError) as error:
                _log.warning("cannot join here", url=client.url, why=str(error))
        return await self._clients[-1].join_runner(self.runner)

    def _renew(self) -> None:
        """The thread: heartbeats until the block ends."""
        urls, at, failing = [client.url for client in self._clients], 0, False
        pause_s = self._lease_s / _BEATS_A_LEASE
        while not self._over.wait(pause_s):
            try:
                with self._blocking(urls[at], api_key=self._api_key, patience_s=0.0, trust=self._trust) as client:
                    while not self._over.is_set():
                        pause_s = client.renew_runner(self.runner).lease_s / _BEATS_A_LEASE
                        failing = False
                        self._over.wait(pause_s)
            except ConflictError as error:
                if not self._over.is_set():
                    self._loop.call_soon_threadsafe(self._lose, error)
                return
            except RollmeshError as error:
                if not failing:
                    _log.warning("waiting", waiting_for="the runner's lease to be renewed", why=str(error))
                failing, pause_s, at = True, _AGAIN_S, (at + 1) % len(urls)

    def _lose(self, error: ConflictError) -> None:
        if not self._taken.done():
            self._taken.set_exception(error)
