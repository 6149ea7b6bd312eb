"""Waiting for admission: first come first served, one Redis call for everybody who waits.

open() ──► queue ──► pump: one ledger call for the whole queue ──► admitted, ordinal
             ▲         │ refused: sleep until a commit, a deadline, or the poll interval
             └─────────┘ (other servers share the account, so what closes the gate may change without us)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError

from services.ledger import ADMISSION_CLOSED, HELD_ELSEWHERE, RUN_CONCLUDED, Ledger
from services.waits import WaitBoard
from services.wire.errors import CapacityError, ConcludedError, ConflictError, NotReadyError, RollmeshError

POLL_S = 0.25
"""How long a refused queue sleeps when nothing happens here."""
POST_AFTER_S = 1.0
"""A wait longer than this is posted on the wait board."""
_AT_ONCE = 256

_log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Waiter:
    group_id: str
    ends: float
    since: float
    ordinal: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AdmissionGate:
    """Opens groups in the ledger as the admission policy allows. `run` is a task owned by the server."""

    def __init__(
        self,
        ledger: Ledger,
        board: WaitBoard,
        *,
        server_id: str,
        base_version: int,
        k: int,
        batch: int,
        engine_version: Callable[[], int],
        poll_s: float = POLL_S,
    ) -> None:
        self._ledger = ledger
        self._board = board
        self._server_id = server_id
        self._base_version = base_version
        self._k = k
        self._batch = batch
        self._engine_version = engine_version
        self._poll_s = poll_s
        self._queue: deque[_Waiter] = deque()
        self._wake = asyncio.Event()
        self._closed: RollmeshError | None = None
        self._posted = False
        # Groups that may be open in the ledger though nobody waits for them any more.
        self._orphans: list[str] = []

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def open(self, group_id: str, wait_s: float) -> int:
        """Open `group_id`; returns its ordinal.

        Raises ConflictError when another server holds that group open, CapacityError when admission stays closed for
        `wait_s` seconds, ConcludedError when the run has concluded, NotReadyError when Redis fails or the server shuts
        down. A caller that is cancelled leaves no group open.
        """
        if self._closed is not None:
            raise self._closed
        now = time.monotonic()
        waiter = _Waiter(group_id, now + wait_s, now)
        self._queue.append(waiter)
        # Behind others who were refused there is nothing to try, unless this one cannot wait for the next attempt.
        if len(self._queue) == 1 or wait_s < self._poll_s:
            self._wake.set()
        try:
            return await waiter.ordinal
        except asyncio.CancelledError:
            # The pump may have admitted it in this very moment: then nobody else will ever close it.
            if waiter.ordinal.done() and not waiter.ordinal.cancelled() and waiter.ordinal.exception() is None:
                self._orphans.append(group_id)
                self._wake.set()
            raise

    def notify(self) -> None:
        """Something changed (a commit): try at once."""
        self._wake.set()

    def close(self) -> None:
        """Refuse everybody from now on: the server is shutting down."""
        self._closed = NotReadyError(f"rollout server {self._server_id} is shutting down", "use another server")
        self._fail_all(self._closed)

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await self._sleep()
            self._wake.clear()
            self._forget_cancelled()
            tried = list(self._queue)[:_AT_ONCE]
            try:
                await self._attempt(tried)
                await self._close_orphans()
            except RedisError as error:
                _log.warning("admission failed", error=str(error))
                self._fail_all(NotReadyError(f"admission needs Redis, which failed ({error})", "try again"))
            self._refuse_late(tried)
            await self._post()

    async def _sleep(self) -> None:
        if not self._queue and not self._orphans:
            await self._wake.wait()
            return
        now = time.monotonic()
        timeout = min(self._poll_s, *(waiter.ends - now for waiter in self._queue)) if self._queue else self._poll_s
        if timeout > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()

    async def _attempt(self, waiters: list[_Waiter]) -> None:
        version = self._engine_version()
        if not waiters or version < self._base_version:  # a late joiner: the bus will bring it up to the run's version
            return
        group_ids = [waiter.group_id for waiter in waiters]
        try:
            ordinals = await self._ledger.open_groups_in_order(
                group_ids,
                self._server_id,
                engine_version=version,
                base_version=self._base_version,
                k=self._k,
                batch=self._batch,
            )
        except RedisError:
            self._orphans += group_ids  # the script may have run although its answer was lost
            raise
        for waiter, ordinal in zip(waiters, ordinals, strict=True):
            if ordinal == ADMISSION_CLOSED:
                break
            self._queue.remove(waiter)
            if waiter.group_id in self._orphans:  # one who asked for it before gave up; now somebody has it
                self._orphans.remove(waiter.group_id)
            if waiter.ordinal.done():
                self._orphans.append(waiter.group_id)
            elif ordinal == RUN_CONCLUDED:
                waiter.ordinal.set_exception(ConcludedError("the run has concluded", "no more groups are opened"))
            elif ordinal == HELD_ELSEWHERE:
                what = f"another rollout server holds group {waiter.group_id}"
                waiter.ordinal.set_exception(ConflictError(what, "open all siblings of a group on one server"))
            else:
                waiter.ordinal.set_result(ordinal)

    async def _close_orphans(self) -> None:
        while self._orphans:
            orphan = self._orphans[0]
            await self._ledger.close_group(orphan, dropped=True)
            self._orphans.remove(orphan)

    def _forget_cancelled(self) -> None:
        if any(waiter.ordinal.done() for waiter in self._queue):
            self._queue = deque(waiter for waiter in self._queue if not waiter.ordinal.done())

    def _refuse_late(self, tried: list[_Waiter]) -> None:
        """Refuse those whose time is up. Who came while the ledger was asked for others has yet to be tried."""
        now = time.monotonic()
        for waiter in tried:
            if waiter.ends <= now and not waiter.ordinal.done():
                version = self._engine_version()
                waiter.ordinal.set_exception(
                    CapacityError(f"admission is closed while this server serves version {version}", self._poll_s)
                )
        self._forget_cancelled()

    def _fail_all(self, error: RollmeshError) -> None:
        for waiter in self._queue:
            if not waiter.ordinal.done():
                waiter.ordinal.set_exception(error)
        self._queue.clear()

    async def _post(self) -> None:
        """Say on the wait board what the head of the queue waits for, once it has waited long."""
        waits_long = bool(self._queue) and time.monotonic() - self._queue[0].since > POST_AFTER_S
        if waits_long == self._posted:
            return
        try:
            if waits_long:
                version = self._engine_version()
                await self._board.post(
                    f"admission: {self.waiting} groups wait for weights newer than version {version}"
                )
            else:
                await self._board.clear()
            self._posted = waits_long
        except RedisError as error:
            _log.warning("cannot post a wait", error=str(error))
