"""Admission queue of groups: first come first served, one Redis call for all who wait.

open() ──► queue ──► pump: one ledger call for the whole queue ──► admitted, ordinal
             ▲         │ refused: sleep until a commit or a closing here, a deadline, or the poll interval
             └─────────┘ (other servers share the account, so admission may open without an event here)

A refusal carries a Retry-After, estimated from the rate of commits and closings seen here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError

from services.policies.admission import AdmissionRules, Closed, Places, StoreUse, places
from services.policies.retry_after import UNKNOWN_S, RetryEstimate
from services.run_store import admission_queue
from services.run_store.ledger import Ledger
from services.run_store.status import WaitBoard
from services.wire.errors import CapacityError, ConcludedError, ConflictError, NotReadyError, RollmeshError

POLL_S = 0.25
"""How long a refused queue sleeps when nothing happens here."""
POST_AFTER_S = 1.0
"""A wait longer than this is posted on the wait board."""
_AT_ONCE = 256
_NO_TRAINER = "a trainer must take groups, or open with purpose=evaluate"

_log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Waiter:
    """`ends` and `since` on the monotonic clock, `asked_at` in Unix seconds. `ahead`: how many came before it."""

    group_id: str
    ends: float
    since: float
    asked_at: float = field(default_factory=time.time)
    ahead: int = 0
    queued: bool = False
    """In Redis too: other servers keep its place."""
    ordinal: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class _Refusal:
    """What the account, and Redis, looked like when a group was last refused."""

    left: Places
    straggler: admission_queue.OpenGroupRecord | None
    store: StoreUse | None

    def named(self, version: int) -> tuple[Closed, int | None]:
        """What is waited for, of an engine that serves `version`: the straggler, or newer weights."""
        if self.left.closed_by is Closed.STALENESS:
            return Closed.STALENESS, version
        return self.left.closed_by, None if self.straggler is None else self.straggler.ordinal


class AdmissionGate:
    """Opens groups in the ledger as the admission policy allows. `run` is a task owned by the server."""

    def __init__(
        self,
        ledger: Ledger,
        board: WaitBoard,
        *,
        server_id: str,
        rules: AdmissionRules,
        engine_version: Callable[[], int],
        store: Callable[[], StoreUse | None] = lambda: None,
        poll_s: float = POLL_S,
    ) -> None:
        self._ledger = ledger
        self._board = board
        self._server_id = server_id
        self._rules = rules
        self._engine_version = engine_version
        self._store = store
        self._poll_s = poll_s
        self._queue: deque[_Waiter] = deque()
        self._wake = asyncio.Event()
        self._closed: RollmeshError | None = None
        self._estimate = RetryEstimate(self._rules, engine_version(), time.monotonic())
        self._refusal: _Refusal | None = None
        self._posted: tuple[Closed, int | None] | None = None
        self._leaving: list[str] = []
        # Groups that may be open in the ledger though their callers are gone.
        self._orphans: list[str] = []
        ledger.on_closing(self._closings)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def open(self, group_id: str, wait_s: float) -> int:
        """Open `group_id`; returns its ordinal.

        Raises ConflictError when that group was opened before, by any server, CapacityError when admission stays closed for
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
            # It may have been admitted in this very moment: then it must be closed here.
            if waiter.ordinal.done() and not waiter.ordinal.cancelled() and waiter.ordinal.exception() is None:
                self._orphans.append(group_id)
                self._wake.set()
            raise

    def notify(self) -> None:
        """Something changed (a commit): try at once."""
        self._estimate.serves(self._engine_version(), time.monotonic())
        self._wake.set()

    def _closings(self, open_for_s: Sequence[float], *, dropped: bool) -> None:
        """Groups were closed here. A place is free only where they will not be trained, or their number closed the gate."""
        self._estimate.closed(open_for_s, time.monotonic())
        waits_for_commit = self._refusal is None or self._refusal.left.closed_by is Closed.STALENESS
        if self._queue and (dropped or not waits_for_commit):
            self._wake.set()

    def close(self) -> None:
        """Refuse all from now on: the server is shutting down."""
        self._closed = NotReadyError(f"rollout server {self._server_id} is shutting down", "use another server")
        self._fail_all(self._closed)
        self._wake.set()

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            await self._sleep()
            self._wake.clear()
            self._estimate.serves(self._engine_version(), time.monotonic())
            self._forget_cancelled()
            waiting = list(self._queue)
            try:
                if not await self._attempt(waiting[:_AT_ONCE]):
                    waiting = waiting[:_AT_ONCE]  # the others' turn comes at once
                    self._wake.set()
                self._refuse_late(waiting)
                await self._tidy()
            except RedisError as error:
                _log.warning("admission failed", error=str(error))
                self._fail_all(NotReadyError(f"admission needs Redis, which failed ({error})", "try again"))
            await self._post()

    async def _sleep(self) -> None:
        if not self._queue and not self._orphans and not self._leaving:
            await self._wake.wait()
            return
        now = time.monotonic()
        timeout = min(self._poll_s, *(waiter.ends - now for waiter in self._queue)) if self._queue else self._poll_s
        if timeout > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._wake.wait()

    async def _attempt(self, waiters: list[_Waiter]) -> bool:
        """Ask for these; returns whether admission is closed, to those too who wait behind them."""
        version = self._engine_version()
        if not waiters or version < self._rules.base_version:
            # No waiters, or a server that joined late: the bus will bring it up to the run's version.
            return True
        now, store = time.monotonic(), self._store()
        asking = [
            admission_queue.Asking(waiter.group_id, waiter.asked_at, stays=waiter.ends > now) for waiter in waiters
        ]
        try:
            admitted = await self._ledger.admission.admit(
                asking, self._server_id, rules=self._rules, engine_version=version, store=store
            )
        except RedisError:
            self._orphans += [waiter.group_id for waiter in waiters]  # it may have been carried out, its answer lost
            raise
        for waiter, each in zip(waiters, asking, strict=True):
            waiter.queued = each.stays
        return self._settle(waiters, admitted, version, store)

    def _settle(
        self, waiters: list[_Waiter], admitted: admission_queue.Admitted, version: int, store: StoreUse | None
    ) -> bool:
        refused = False
        for waiter, answer in zip(waiters, admitted.answers, strict=True):
            waiter.ahead = answer.ahead
            if answer.ordinal == admission_queue.ADMISSION_CLOSED:
                refused = True
                if waiter.ordinal.done() and waiter.queued and waiter not in self._queue:
                    self._leaving.append(waiter.group_id)  # it gave up, or the gate was closed, meanwhile
                continue
            if waiter in self._queue:  # else the gate was closed while Redis was asked
                self._queue.remove(waiter)
            if waiter.group_id in self._orphans:  # an earlier caller gave up; this one has it now
                self._orphans.remove(waiter.group_id)
            if waiter.ordinal.done():
                if answer.ordinal >= 0:  # nobody takes it: it is closed here, where it was opened
                    self._orphans.append(waiter.group_id)
            elif answer.ordinal == admission_queue.RUN_CONCLUDED:
                waiter.ordinal.set_exception(ConcludedError("the run has concluded", "no more groups are opened"))
            elif answer.ordinal == admission_queue.OPENED_BEFORE:
                what = f"group {waiter.group_id} was opened before"
                waiter.ordinal.set_exception(ConflictError(what, "open all siblings of a group on one server"))
            else:
                waiter.ordinal.set_result(answer.ordinal)
        left = places(admitted.account, self._rules, version, store)
        self._refusal = _Refusal(left, admitted.straggler, store) if refused else None
        return refused

    async def _tidy(self) -> None:
        """Remove cancelled waiters from the queue in Redis, and close groups that were opened for them."""
        leaving, self._leaving = self._leaving, []
        await self._ledger.admission.leave(leaving)
        while self._orphans:
            orphan = self._orphans[0]
            await self._ledger.close_group(orphan, dropped=True)
            self._orphans.remove(orphan)

    def _forget_cancelled(self) -> None:
        if any(waiter.ordinal.done() for waiter in self._queue):
            self._leaving += [waiter.group_id for waiter in self._queue if waiter.ordinal.done() and waiter.queued]
            self._queue = deque(waiter for waiter in self._queue if not waiter.ordinal.done())

    def _refuse_late(self, waiting: list[_Waiter]) -> None:
        """Refuse those whose time is up. Who came while the ledger was asked for others has yet to be tried."""
        now = time.monotonic()
        for place, waiter in enumerate(waiting):
            if waiter.ends <= now and not waiter.ordinal.done():
                ahead = max(waiter.ahead, place)
                waiter.ordinal.set_exception(CapacityError(self._why_closed(), self._retry_after_s(ahead, now)))
        self._forget_cancelled()

    def _why_closed(self) -> str:
        version = self._engine_version()
        why = f"admission is closed while this server serves version {version}"
        if self._refusal is None:
            return why
        if self._refusal.left.closed_by is Closed.STALENESS:
            # Nothing was ever trained: there may be no trainer, and then it stays closed.
            return f"{why}; {_NO_TRAINER}" if version <= self._rules.base_version else why
        return f"admission is closed until {self._awaited(self._refusal)}"

    def _awaited(self, refusal: _Refusal) -> str:
        if refusal.left.closed_by is Closed.OPEN_GROUPS:
            return f"one of {self._rules.most_open} open groups is closed"
        if refusal.left.closed_by is Closed.BYTES:
            return f"Redis holds less (now {refusal.store}): a checkpoint of the trainer frees what is trained"
        if refusal.straggler is None:
            return "an older group is closed"
        oldest = refusal.straggler
        return (
            f"group {oldest.ordinal} of server {oldest.server_id} is closed, the run being {self._rules.window} ahead"
        )

    def _retry_after_s(self, ahead: int, now: float) -> float:
        if self._refusal is None:
            return UNKNOWN_S
        straggler = self._refusal.straggler
        age_s = None if straggler is None else time.time() - straggler.opened_at
        return self._estimate.refused(self._refusal.left, ahead, age_s, now)

    def _fail_all(self, error: RollmeshError) -> None:
        for waiter in self._queue:
            if not waiter.ordinal.done():
                waiter.ordinal.set_exception(error)
        self._leaving += [waiter.group_id for waiter in self._queue if waiter.queued]
        self._queue.clear()

    async def _post(self) -> None:
        """Say on the wait board what the head of the queue waits for, once it has waited long."""
        waits_long = bool(self._queue) and time.monotonic() - self._queue[0].since > POST_AFTER_S
        version = self._engine_version()
        posted = self._refusal.named(version) if waits_long and self._refusal is not None else None
        if posted == self._posted:
            return
        if posted is None or self._refusal is None:
            written = await self._board.clear()
        elif self._refusal.left.closed_by is Closed.STALENESS:
            written = await self._board.post(
                f"admission: {self.waiting} groups wait for weights newer than version {version}"
            )
        else:
            written = await self._board.post(
                f"admission: {self.waiting} groups wait until {self._awaited(self._refusal)}"
            )
        if written:
            self._posted = posted
