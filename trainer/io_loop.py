"""The trainer's event loop, in a thread of its own: the training thread never waits for Redis, the bus or a disk.

training thread ──spawn──► task on the loop ──failed──► raised in the training thread at its next `check`
                ──call───► … and waits for the answer, with a deadline
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import structlog

from services.host.aio import new_loop
from services.host.process import take_turns
from services.run_store.patience import REPEAT_WITHIN_S, repeated
from services.run_store.status import WaitBoard
from services.wire.errors import DeadlineError

_WRITE_AGAIN_S = 1.0
_LAST_TRY_S = 30.0
"""The last of the tries may take so long."""

_log = structlog.get_logger()
_Answer = TypeVar("_Answer")


class Background:
    """An asyncio loop in a thread. Tasks are owned here: `close` cancels and awaits what is left of them."""

    def __init__(self) -> None:
        take_turns()
        self._loop = new_loop()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="trainer-io", daemon=True)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, _Answer], name: str, *, essential: bool = True) -> Future[_Answer]:
        """Start `work` on the loop. Its failure comes up in `check`; where it is not `essential`, in the log alone."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda done: self._note(done, name, essential))
        return future

    def begin(self, work: Coroutine[Any, Any, _Answer]) -> Future[_Answer]:
        """Start `work` on the loop. Its failure is told to whoever waits for its result, and to nobody else."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop make a call that does not block."""
        self._loop.call_soon_threadsafe(call)

    def call(self, work: Coroutine[Any, Any, _Answer], name: str, deadline_s: float) -> _Answer:
        """Run `work` on the loop and wait for its answer. Raises what it raised, or DeadlineError."""
        return self.result(self.begin(work), name, deadline_s)

    def insist(self, call: Callable[[], Awaitable[_Answer]], name: str) -> _Answer:
        """The answer of a call to Redis that may be made twice, made again while Redis fails (`repeated`)."""
        return self.call(repeated(call, name), name, REPEAT_WITHIN_S + _LAST_TRY_S)

    def result(self, future: Future[_Answer], name: str, deadline_s: float) -> _Answer:
        """The result of a future of this loop, waited for. Raises what it raised, or DeadlineError."""
        try:
            return future.result(timeout=deadline_s)
        except FutureTimeout as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineError(f"{name} took longer than {deadline_s:g} s") from error

    def watch(self, future: Future[Any], name: str) -> None:
        """Have `check` raise the failure of a future that somebody else made."""
        future.add_done_callback(lambda done: self._note(done, name))

    def check(self) -> None:
        """Raise the first failure of a spawned task."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Cancel what still runs, await it, end the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _note(self, done: Future[Any], name: str, essential: bool = True) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None or self._failure is not None:
            return
        _log.error("background task failed", task=name, why=str(error), ends_the_run=essential)
        if essential:
            self._failure = error


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class WaitSign:
    """The trainer's entry on the wait board, set from the training thread without waiting for Redis.

    The last post or clear wins, whatever the network does: those that it overtakes are left out, and it is written again
    until it stands.
    """

    def __init__(self, board: WaitBoard, background: Background) -> None:
        self._board, self._background = board, background
        self._order = asyncio.Lock()
        self._posted = False
        self._newest = 0

    def post(self, waiting_for: str) -> None:
        self._posted = True
        self._set(waiting_for)

    def clear(self) -> None:
        if self._posted:
            self._posted = False
            self._set(None)

    def _set(self, waiting_for: str | None) -> None:
        self._newest += 1
        self._background.spawn(self._apply(waiting_for, self._newest), "wait board", essential=False)

    async def _apply(self, waiting_for: str | None, number: int) -> None:
        async with self._order:
            while number == self._newest:
                if await (self._board.clear() if waiting_for is None else self._board.post(waiting_for)):
                    return
                await asyncio.sleep(_WRITE_AGAIN_S)


class Interrupt:
    """Handles SIGTERM and Ctrl-C.

    starting, concluding   at once: SystemExit unwinds, and everything opened is closed (nothing is lost: see `step_log`)
    inside `graceful`      the current step is finished first; a second signal ends at once

    `requested`: the signal that asked for the end, None until then. True once one has.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._graceful = False

    def install(self) -> None:
        """Take over both signals; call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        """Within the block, the first signal only sets `requested`."""
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    def __bool__(self) -> bool:
        return self.requested is not None

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that ended by the signal."""
        return 128 + (self.requested or 0)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        at_once = not self._graceful or self.requested is not None
        self.requested = number
        _log.info("stopping", signal=signal.Signals(number).name, after="now" if at_once else "this step")
        if at_once:
            raise SystemExit(self.exit_code)
