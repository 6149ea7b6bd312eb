"""The decode loop on its own thread: it alone touches model, batch and KV cache; the event loop posts commands to it.

    event loop                               decode thread
    submit, abort, pause, commit ──► inbox ──► between two steps: run the commands
             deltas of a step    ◄── one call_soon_threadsafe a step ◄── the next step's forward begins

                 idle ──command──► gathering (waits 16 ms at most for more of a burst) ──► decoding ──nothing left──► idle
                                          any state ──error──► crashed: every waiting call gets the error

Commands run in order, each between two steps: so a weight commit is atomic for every request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar, cast

import structlog
import torch

from rollout_server.engines.base import EngineCrashedError, GenerationRequest, Outcome
from rollout_server.engines.step_timing import StepTiming
from rollout_server.engines.torch.scheduler import Scheduler
from services.host.process import take_turns
from services.wire.errors import DeadlineError, NotReadyError
from services.wire.weights_api import CommitAnswer

_log = structlog.get_logger()
T = TypeVar("T")

Mode = Literal["run", "drain", "freeze"]
_COMMAND_DEADLINE_S = 60.0
_DRAIN_DEADLINE_S = 3600.0
# A burst's requests reach an engine about a millisecond apart. Each that comes alone costs a prefill and narrow steps:
# gathering a burst of 16 saved 10 of 72 ms of CPU. A lone request pays the gap once.
_GATHER_GAP_S = 0.002
_GATHER_S = 0.016


class DecodeLoop:
    """Runs a `Scheduler` on its own thread. Methods are for the event loop, but those with an underscore.

    `deliver` is called on the event loop with the outcomes of a step; `on_crash` once, with the error, if the thread dies.
    """

    def __init__(
        self,
        batch: Scheduler,
        *,
        version: int,
        threads: int,
        deliver: Callable[[list[Outcome]], None],
        on_crash: Callable[[EngineCrashedError], None],
    ) -> None:
        self.version = version
        self.failure: EngineCrashedError | None = None
        self._batch = batch
        self._threads = threads
        self._deliver = deliver
        self._on_crash = on_crash
        self._timing = StepTiming()
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._pending: set[Future[object]] = set()
        self._mode: Mode = "run"
        self._drained: list[Future[None]] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; outcomes go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        take_turns()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    async def stop(self, deadline_s: float) -> None:
        """End the thread after its current step. Raises DeadlineError if it does not end in time."""
        thread = self._thread
        if thread is None:
            return
        self._inbox.put(self._close)
        await asyncio.to_thread(thread.join, deadline_s)
        if thread.is_alive():
            raise DeadlineError(f"the decode thread did not end within {deadline_s} s", "a step takes longer than that")
        self._thread = None
        for future in list(self._pending):
            if not future.done():
                future.set_exception(NotReadyError("the engine has been closed", "ask another server"))

    @property
    def running(self) -> int:
        return self._batch.running

    @property
    def waiting(self) -> int:
        return self._batch.waiting

    @property
    def paused(self) -> bool:
        return self._mode != "run"

    @property
    def tokens(self) -> int:
        return self._timing.tokens

    @property
    def prefill_tokens(self) -> int:
        return self._batch.prefill_tokens

    @property
    def kv_use(self) -> float:
        return self._batch.kv_use

    @property
    def commits(self) -> int:
        return self._timing.commits

    def stalls_ms(self) -> list[float]:
        return self._timing.stalls_ms()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; its outcomes come through `deliver`. Raises EngineCrashedError, NotReadyError."""
        self._post(lambda: self._batch.add(request))

    def drop(self, request_id: str) -> None:
        """Abort a request that nobody listens to any more."""
        if self.failure is None and self._thread is not None:
            self._inbox.put(lambda: self._batch.abort([request_id]))

    async def call(self, name: str, command: Callable[[], T]) -> T:
        """Run `command` on the decode thread between two steps and return what it returns.

        Raises what it raises; DeadlineError if its turn does not come in time, and then it never runs.
        """
        future: Future[T] = Future()
        self._track(future)

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._hand_out()  # before the caller is told that the command was carried out
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, who is waiting for it
                future.set_exception(error)

        self._post(run)
        return await self._result(name, future, _COMMAND_DEADLINE_S)

    async def drain(self) -> None:
        """Start no waiting request from now on; return when the running ones have ended."""
        future: Future[None] = Future()
        self._track(future)

        def run() -> None:
            self._mode = "drain"
            self._drained.append(future)

        self._post(run)
        await self._result("running requests to end", future, _DRAIN_DEADLINE_S)

    async def freeze(self) -> None:
        """Stop decoding; requests keep their place and their KV cache."""
        await self.call("decoding to freeze", lambda: self._set_mode("freeze"))

    async def abort_and_freeze(self) -> None:
        def run() -> None:
            self._batch.abort(None)
            self._set_mode("freeze")

        await self.call("requests to abort", run)

    async def resume(self) -> None:
        await self.call("decoding to resume", lambda: self._set_mode("run"))

    async def abort(self, request_ids: list[str] | None) -> int:
        return await self.call("requests to abort", lambda: self._batch.abort(request_ids))

    async def commit(self, version: int, flip: Callable[[], None]) -> CommitAnswer:
        """Run `flip` between two decode steps; later steps sample with `version`."""

        def run() -> CommitAnswer:
            started = time.perf_counter()
            flip()
            self.version = version
            self._batch.mark_version(version)
            self._timing.commit()
            return CommitAnswer(version, (time.perf_counter() - started) * 1e3, self._batch.running)

        return await self.call(f"the commit of version {version}", run)

    def _set_mode(self, mode: Mode) -> None:
        self._mode = mode
        if mode == "freeze":
            self._timing.break_off()

    def _close(self) -> None:
        self._closing = True

    def _post(self, command: Callable[[], object]) -> None:
        if self.failure is not None:
            raise self.failure
        if self._thread is None:
            raise NotReadyError("the engine is not running", "start it first")
        self._inbox.put(command)

    def _track(self, future: Future[T]) -> None:
        # Before it is posted: a crash must find it here, or be found by `_post`.
        self._pending.add(cast("Future[object]", future))
        future.add_done_callback(lambda done: self._pending.discard(cast("Future[object]", done)))

    async def _result(self, name: str, future: Future[T], deadline_s: float) -> T:
        try:
            # `wait_for` would wake this task a turn of the event loop later, and a turn may take milliseconds.
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(f"waited {deadline_s} s for {name}", "the decode thread is busy or stuck") from error

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._take_commands()
                    self._step()
        except Exception as error:  # noqa: BLE001 - the thread ends here; every waiter is told below
            self._crash(error)

    def _take_commands(self) -> None:
        if not self._can_step():
            self._hand_out()
            self._inbox.get()()
            if self._can_step() and not self._batch.running:
                self._gather()
        while not self._inbox.empty():
            self._inbox.get()()

    def _gather(self) -> None:
        """A burst arrives as many small calls; one wide batch costs far less than many narrow ones."""
        ends = time.perf_counter() + _GATHER_S
        while not self._closing and time.perf_counter() < ends:
            try:
                self._inbox.get(timeout=_GATHER_GAP_S)()
            except Empty:
                return

    def _can_step(self) -> bool:
        if self._mode == "run":
            return bool(self._batch.running or self._batch.waiting)
        return self._mode == "drain" and bool(self._batch.running)

    def _step(self) -> None:
        if not self._can_step() or self._closing:
            self._hand_out()
            return
        # What was sampled is handed out when the next forward begins, which needs the interpreter's lock no more: the event
        # loop would contend for it with all that lies between two forwards, and half a millisecond each time.
        sampled = self._batch.step(self.version, admit=self._mode == "run", before_forward=self._hand_out)
        self._timing.step(time.perf_counter(), sampled)
        if not self._batch.running:
            self._timing.break_off()

    def _hand_out(self) -> None:
        if self._batch.outbox:
            self._to_loop(self._deliver, self._batch.take_outbox())
        if self._drained and not self._batch.running:
            drained, self._drained = self._drained, []
            for future in drained:
                if future.set_running_or_notify_cancel():
                    future.set_result(None)

    def _to_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is None or self._loop.is_closed():
            _log.warning("event_loop_gone", remedy="close the engine before its event loop")
            self._closing = True
            return
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _crash(self, error: Exception) -> None:
        failure = EngineCrashedError(error)
        failure.__cause__ = error
        self.failure = failure
        _log.error("engine_crashed", exc_info=error)
        for future in list(self._pending):
            if not future.done():
                try:
                    future.set_exception(failure)
                except CancelledError:
                    continue
        self._to_loop(self._on_crash, failure)
