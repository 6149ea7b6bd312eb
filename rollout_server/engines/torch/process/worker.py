"""The process of an engine core: `python -m rollout_server.engines.torch.process.worker SOCKET`.

A rollout server starts it (`CoreProcess`), tells it everything over the socket of that number, and ends it by closing it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import structlog

from rollout_server.engines.base import GenerationDelta, Outcome, RequestFailed
from rollout_server.engines.torch.engine import NOT_STARTED, CoreSettings
from rollout_server.engines.torch.process.link import (
    Abort,
    Answer,
    Ask,
    Commit,
    Crashed,
    FailedRequest,
    Failure,
    Generated,
    Link,
    Moment,
    Pause,
    Question,
    Resume,
    Rollback,
    Stage,
    Start,
    Submit,
    ToCore,
    read_first,
)
from services.host.aio import new_loop
from services.host.process import collect_seldom, heavy_imports, leave_quickly
from services.observability.logging import configure_logging
from services.wire.errors import RollmeshError

if TYPE_CHECKING:
    from rollout_server.engines.torch.core import EngineCore

_log = structlog.get_logger()
_TELL_EVERY_S = 0.1


def main() -> None:
    # Signals are for the server: a terminal's Ctrl-C reaches both, and the core ends when the server lets go of it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    collect_seldom()
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        settings = read_first(link.recv, CoreSettings)
    except (EOFError, OSError):
        return
    configure_logging(os.environ.get("ROLLMESH_SERVICE", "rollout-server"), run_id=settings.run_id)
    with heavy_imports():
        from rollout_server.engines.torch.core import EngineCore

    core: EngineCore | RollmeshError
    try:
        core = EngineCore(settings)
        core.preload()
    except RollmeshError as error:
        core = error
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(Worker(core).serve(link))
    leave_quickly()


class Worker:
    """Carries out what the server asks. `core`: the error instead, where it cannot be made: told when it is started."""

    def __init__(self, core: EngineCore | RollmeshError) -> None:
        self._core = core
        self._link: Link[ToCore] = Link(ToCore, self._on_message, self._on_lost)
        self._lost = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self._stalls_told: list[float] = []
        self._last: Moment | None = None

    async def serve(self, link: socket.socket) -> None:
        """Until the server is gone, or lets go."""
        link.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self._link, sock=link)
        telling = asyncio.create_task(self._tell(), name="status of the engine")
        try:
            await self._lost.wait()
        finally:
            ending = [telling, *self._asking]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            if not isinstance(self._core, RollmeshError):
                await self._core.close()

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        """What a decode step has generated (`Outcomes`)."""
        deltas = [each for each in outcomes if isinstance(each, GenerationDelta)]
        failed = [FailedRequest.of(each) for each in outcomes if isinstance(each, RequestFailed)]
        self._send(Generated(deltas, failed, self._moment()))

    def fail_all(self, error: RollmeshError) -> None:
        self._send(Crashed(Failure.of(error)))

    def _on_message(self, message: ToCore) -> None:
        if isinstance(message, Ask):
            task = asyncio.get_running_loop().create_task(self._answer(message), name="question of the server")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            return
        if isinstance(message, Submit):
            try:
                self._made().submit(message.request)
            except RollmeshError as error:
                self.deliver([RequestFailed(message.request.request_id, error)])
        else:
            self._made().drop(message.request_id)

    def _on_lost(self) -> None:
        self._lost.set()

    async def _answer(self, ask: Ask) -> None:
        value: object = None
        failure: Failure | None = None
        try:
            value = await self._carry_out(ask.question)
        except RollmeshError as error:
            failure = Failure.of(error)
        except Exception as error:  # noqa: BLE001 - a bug: said with its traceback here, and by name there
            _log.exception("engine_failed", question=type(ask.question).__name__)
            failure = Failure.of(RollmeshError(f"the engine failed ({error!r})", "see the server's log"))
        self._send(Answer(ask.number, msgspec.Raw(msgspec.msgpack.encode(value)), failure, self._moment()))

    async def _carry_out(self, question: Question) -> object:
        core = self._made()
        if isinstance(question, Start):
            return await core.start(self)
        if isinstance(question, Abort):
            return await core.abort(question.request_ids)
        if isinstance(question, Pause):
            await core.pause(question.mode)
            return None
        if isinstance(question, Resume):
            await core.resume()
            return None
        if isinstance(question, Stage):
            return await core.stage(question.manifest)
        if isinstance(question, Commit):
            return await core.commit(question.version)
        if isinstance(question, Rollback):
            return await core.rollback(question.version)
        return await core.weights_digest()

    def _made(self) -> EngineCore:
        if isinstance(self._core, RollmeshError):
            raise self._core
        return self._core

    def _moment(self) -> Moment:
        status = NOT_STARTED if isinstance(self._core, RollmeshError) else self._core.status()
        news = status.stalls_ms if status.stalls_ms != self._stalls_told else None
        if news is not None:
            self._stalls_told = news
        self._last = Moment(replace(status, stalls_ms=[]), news)
        return self._last

    async def _tell(self) -> None:
        """What changes while no delta says it: how many requests run and wait, and how many tokens there are."""
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            before = self._last
            if before is not None and (now := self._moment()) != before:
                self._send(now)

    def _send(self, message: object) -> None:
        # A server that is gone needs no answer: the connection's end is on its way.
        with suppress(RollmeshError):
            self._link.send(message)


if __name__ == "__main__":
    main()
