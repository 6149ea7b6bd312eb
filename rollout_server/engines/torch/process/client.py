"""The server's end of an engine core that has a process of its own.

    made ──preload──► its process imports torch ──start──► loaded ──close──► ended
                                  any state ──its process ends──► failed: whoever waits gets the error

The core ends with the server, however that ends: it sees its connection close.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from rollout_server.engines.base import EngineCrashedError, EngineStatus, GenerationRequest, Outcome, RequestFailed
from rollout_server.engines.torch.engine import NOT_STARTED, CoreSettings, Loaded, Outcomes
from rollout_server.engines.torch.process.link import (
    Abort,
    Answer,
    Ask,
    Commit,
    Digest,
    Drop,
    FromCore,
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
    encode_frame,
)
from services.config.model_folder import weight_file_bytes
from services.policies.training.deadlines import within
from services.wire.errors import DeadlineError, NotReadyError, RollmeshError
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer

_log = structlog.get_logger()
_Value = TypeVar("_Value")

# Longer than the core's own deadlines, whose errors say more.
_COMMAND_S = 90.0
_LONG_S = 3700.0
_CLOSE_S = 40.0
_END_S = 5.0


class CoreProcess:
    """See `rollout_server.engines.torch.engine.Core`; all methods are for one event loop."""

    def __init__(self, settings: CoreSettings, start_within_s: float) -> None:
        """`start_within_s`: for the model to be loaded."""
        self._settings, self._start_within_s = settings, start_within_s
        self._hashed_within = within(_LONG_S, weight_file_bytes(Path(settings.model)))
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link[FromCore] | None = None
        self._outcomes: Outcomes | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._status = NOT_STARTED
        self._stalls_ms: list[float] = []
        self._failure: RollmeshError | None = None
        self._snapshot: EngineStatus | None = None
        """Of these three, since the last of them changed: every turn that begins asks for it."""
        self._ending: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def policy_version(self) -> int:
        return self._status.policy_version

    @property
    def pid(self) -> int | None:
        """Of its process; None before there is one."""
        return None if self._process is None else self._process.pid

    def preload(self) -> None:
        """Start the process, which does its imports meanwhile."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        settings = self._settings
        # In the settings there may be a key: they go through the socket, where nobody else reads them.
        ours.sendall(encode_frame(settings))
        command = [sys.executable, "-P", "-m", "rollout_server.engines.torch.process.worker", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                [*command, "--run-id", settings.run_id, "--model", settings.model],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        self._socket = ours

    async def start(self, outcomes: Outcomes) -> Loaded:
        """Raises what loading raises, EngineCrashedError where the process ends meanwhile."""
        self.preload()
        assert self._socket is not None
        self._outcomes = outcomes
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        _, self._link = await loop.create_connection(self._make_link, sock=self._socket)
        return await self._ask("the engine to load its model", Start(), Loaded, self._start_within_s)

    def submit(self, request: GenerationRequest) -> None:
        self._open_link().send(Submit(request))

    def drop(self, request_id: str) -> None:
        if self._failure is None and self._link is not None and not self._closing:
            self._link.send(Drop(request_id))

    async def abort(self, request_ids: list[str] | None) -> int:
        return await self._ask("requests to abort", Abort(request_ids), int)

    async def pause(self, mode: PauseMode) -> None:
        await self._ask(f"decoding to pause ({mode})", Pause(mode), type(None), _LONG_S)

    async def resume(self) -> None:
        await self._ask("decoding to resume", Resume(), type(None))

    async def stage(self, manifest: bytes) -> StageAnswer:
        return await self._ask("weights to be staged", Stage(manifest), StageAnswer, self._hashed_within)

    async def commit(self, version: int) -> CommitAnswer:
        return await self._ask(f"the commit of version {version}", Commit(version), CommitAnswer)

    async def rollback(self, version: int) -> CommitAnswer:
        return await self._ask(f"the return to version {version}", Rollback(version), CommitAnswer)

    async def weights_digest(self) -> str:
        return await self._ask("the digest of the weights", Digest(), str, self._hashed_within)

    def status(self) -> EngineStatus:
        """As the core told it last: at most a tenth of a second ago, and behind every answer and delta."""
        if self._snapshot is None:
            failure = self._status.failure if self._failure is None else self._failure.what
            self._snapshot = replace(self._status, stalls_ms=self._stalls_ms, failure=failure)
        return self._snapshot

    async def close(self) -> None:
        """End the process. Raises DeadlineError where it does not end in time; it is killed then."""
        self._closing = True
        process, self._process = self._process, None
        if self._link is not None:
            self._link.close()
        elif self._socket is not None:
            self._socket.close()
        if process is None:
            return
        try:
            await asyncio.to_thread(process.wait, _CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait, _END_S)
            raise DeadlineError(
                f"the engine's process did not end within {_CLOSE_S:g} s and was killed",
                "a step takes longer than that",
            ) from None
        finally:
            self._fail(NotReadyError("the engine has been closed", "ask another server"))

    def _make_link(self) -> Link[FromCore]:
        return Link(FromCore, self._on_message, self._on_lost)

    def _open_link(self) -> Link[FromCore]:
        if self._failure is not None:
            raise self._failure
        if self._link is None:
            raise NotReadyError("the engine is not started", "wait until the server is ready")
        return self._link

    async def _ask(self, name: str, question: Question, kind: type[_Value], deadline_s: float = _COMMAND_S) -> _Value:
        link = self._open_link()
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            link.send(Ask(number, question))
            async with asyncio.timeout(deadline_s):
                return msgspec.msgpack.decode(await future, type=kind)
        except TimeoutError:
            raise DeadlineError(f"waited {deadline_s:g} s for {name}", "the engine's process is stuck") from None
        finally:
            del self._asked[number]

    def _on_message(self, message: FromCore) -> None:
        if isinstance(message, Generated):
            self._told(message.moment)
            outcomes: list[Outcome] = [
                *message.deltas,
                *(RequestFailed(each.request_id, each.failure.error()) for each in message.failed),
            ]
            if self._outcomes is not None:
                self._outcomes.deliver(outcomes)
        elif isinstance(message, Answer):
            self._told(message.moment)
            future = self._asked.get(message.number)
            if future is None or future.done():
                return
            if message.failure is None:
                future.set_result(message.value)
            else:
                future.set_exception(message.failure.error())
        elif isinstance(message, Moment):
            self._told(message)
        else:
            self._fail(message.failure.error())

    def _told(self, moment: Moment) -> None:
        self._status, self._snapshot = moment.status, None
        if moment.stalls_ms is not None:
            self._stalls_ms = moment.stalls_ms

    def _on_lost(self) -> None:
        if not self._closing:
            self._ending = asyncio.get_running_loop().create_task(self._say_why_it_ended(), name="end of the engine")

    async def _say_why_it_ended(self) -> None:
        code: int | None = None
        if self._process is not None:
            try:
                code = await asyncio.to_thread(self._process.wait, _END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        ended = "closed its connection" if code is None else f"ended with exit code {code}"
        _log.error("engine_process_ended", exit_code=code)
        self._fail(EngineCrashedError(ChildProcessError(f"its process {ended}")))

    def _fail(self, failure: RollmeshError) -> None:
        if self._failure is not None:
            return
        self._failure, self._snapshot = failure, None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(failure)
        if self._outcomes is not None:
            self._outcomes.fail_all(failure)
