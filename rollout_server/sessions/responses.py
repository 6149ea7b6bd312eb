"""Answers of one session and their retries (idempotency): an answer outlives its connection, a retry replays or joins it.

    call ──new──► Answer ◄── produce: generates tokens, puts chunks ──► (a client listens) ──► captured ──► done
      └──repeated──► listens to the same Answer from its first chunk on

    no listener ──► patience_s ──► cancelled, and nothing of it is captured: no agent ever saw it
    captured, and the listener gone before it got any of it ──► no part of the trajectory, unless a retry gets it

A whole answer is one chunk, a streamed one many; both are replayed byte for byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from services.wire.errors import NotReadyError, RollmeshError

_log = structlog.get_logger()
_KEPT_ANSWERS = 16
_KEPT_BYTES = 1 << 20


class AnswerLostError(RollmeshError):
    """The answer was cancelled because no client listened to it."""

    status = 409
    code = "answer_lost"


class Answer:
    """One answer while it is generated, and after. Used on the event loop only."""

    def __init__(self, call: str | None = None) -> None:
        """`call`: the gateway's name of the call that it answers."""
        self.chunks: list[bytes] = []
        self.call = call
        self.ended = False
        self.error: RollmeshError | None = None
        self.listeners = 0
        self.delivered = False
        """Whether a client that listened got it, or the beginning of it."""
        self._on_delivery: list[Callable[[], object]] = []
        self._unwritten: deque[bytes] = deque()
        self._staged: list[bytes] = []
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def size(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def bytes_to_come(self) -> bytes:
        """The whole answer, as it is once what was staged is released."""
        return b"".join([*self.chunks, *self._unwritten, *self._staged])

    def put(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        self._wake()

    def put_once_written(self, chunk: bytes, written: asyncio.Future[None]) -> None:
        """`put` once `written` is done; never if it fails. Those of several chunks are done in the chunks' order."""
        # Nobody waits for it: a task that wakes for every chunk once more costs as much as the chunk does.
        self._unwritten.append(chunk)
        written.add_done_callback(self._put_next)

    def _put_next(self, written: asyncio.Future[None]) -> None:
        chunk = self._unwritten.popleft()
        if not written.cancelled() and written.exception() is None and not self.ended:
            self.put(chunk)

    def stage(self, chunk: bytes) -> None:
        """Keep a chunk back until `release`: no client may get the end of an answer that is not in the journal."""
        self._staged.append(chunk)

    def release(self) -> None:
        staged, self._staged = self._staged, []
        self.chunks += staged
        self._wake()

    def end(self, error: RollmeshError | None = None) -> None:
        self.ended, self.error = True, error
        self._wake()

    def deliver(self) -> None:
        """A client that listens has got it, or the beginning of it."""
        self.delivered = True
        waiting, self._on_delivery = self._on_delivery, []
        for each in waiting:
            each()

    def when_delivered(self, then: Callable[[], object]) -> None:
        """Call `then` once a client gets it; at once where one has."""
        if self.delivered:
            then()
        else:
            self._on_delivery.append(then)

    async def heard(self) -> None:
        """Return once a client listens: only then is the answer captured."""
        while not self.listeners:
            await self._change()

    async def begun(self) -> None:
        """Return once there is a chunk, or the end. Raises what went wrong before the first chunk."""
        while not self.chunks and not self.ended:
            await self._change()
        if self.error is not None and not self.chunks:
            raise self.error

    async def whole(self) -> bytes:
        """All of it. Raises what went wrong."""
        while not self.ended:
            await self._change()
        if self.error is not None:
            raise self.error
        return b"".join(self.chunks)

    async def stream(self) -> AsyncIterator[bytes]:
        """Chunks from the first on, several at once where they have piled up. Raises what went wrong after them."""
        sent = 0
        while True:
            if sent < len(self.chunks):
                piled = b"".join(self.chunks[sent:])
                sent = len(self.chunks)
                yield piled
            elif self.ended:
                break
            else:
                await self._change()
        if self.error is not None:
            raise self.error

    def attach(self) -> None:
        self.listeners += 1
        self._wake()

    async def _change(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)


Produce = Callable[[Answer], Awaitable[None]]


class Answers:
    """The answers of one session: those being generated, and the last few, for retries."""

    def __init__(self) -> None:
        self._index: IdempotencyIndex[Answer] = IdempotencyIndex()
        self._tasks: dict[Answer, asyncio.Task[None]] = {}
        self._giving_up: dict[Answer, asyncio.TimerHandle] = {}

    def repeated(self, request_key: RequestKey) -> Answer | None:
        """The answer that this call asks for again; None for a new call. Raises KeyReusedError."""
        return self._index.find(request_key)

    def knows(self, request_key: RequestKey) -> bool:
        """Whether this very call, by the gateway's name, was sent here before."""
        return self._index.named(request_key.call)

    def start(self, request_key: RequestKey, produce: Produce) -> Answer:
        """Make a new answer in a task of its own."""
        answer = Answer(request_key.call)
        self._index.add(request_key, answer)
        self._tasks[answer] = asyncio.create_task(self._make(answer, produce))
        return answer

    def restore(self, request_key: RequestKey, whole: bytes) -> None:
        """Take over an answer that another server gave."""
        answer = Answer(request_key.call)
        answer.put(whole)
        answer.end()
        self._index.add(request_key, answer)

    @contextmanager
    def listening(self, answer: Answer, patience_s: float) -> Iterator[None]:
        """A client listens during the block. `patience_s`: how long a retry is waited for if the client disconnects."""
        timer = self._giving_up.pop(answer, None)
        if timer is not None:
            timer.cancel()
        answer.attach()
        try:
            yield
        finally:
            answer.listeners -= 1
            if not answer.listeners and answer in self._tasks:
                loop = asyncio.get_running_loop()
                self._giving_up[answer] = loop.call_later(patience_s, self._cancel, answer, None)

    async def give_up_unheard(self) -> None:
        """Cancel answers that no client listens to, and wait until they have ended."""
        unheard = [(answer, task) for answer, task in self._tasks.items() if not answer.listeners]
        for answer, _ in unheard:
            self._cancel(answer, None)
        if unheard:
            await asyncio.wait([task for _, task in unheard])

    def cancel_all(self, error: RollmeshError) -> None:
        """End what is being generated; listeners get `error`."""
        for answer in list(self._tasks):
            self._cancel(answer, error)

    def _cancel(self, answer: Answer, error: RollmeshError | None) -> None:
        task = self._tasks.get(answer)
        if task is not None and not answer.ended:
            answer.end(error or AnswerLostError("no client listened to this answer any more", "send the call again"))
            # At once, not when the task has unwound: a retry in between would join an answer that nothing generates.
            self._index.forget(answer)
            task.cancel()

    async def _make(self, answer: Answer, produce: Produce) -> None:
        try:
            await produce(answer)
            answer.end()
        except asyncio.CancelledError:
            # By `_cancel`, which has told the listeners why; else by the end of the event loop.
            if not answer.ended:
                answer.end(NotReadyError("the server is shutting down", "use another server"))
        except RollmeshError as error:
            # Without the frames that it came through: they hold the call, for as long as the answer holds the error.
            answer.end(error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - a bug: logged with its traceback, and raised to the listeners
            _log.exception("an answer failed")
            answer.end(RollmeshError(f"the server failed on this call ({type(error).__name__})", "see its log"))
        finally:
            del self._tasks[answer]
            timer = self._giving_up.pop(answer, None)
            if timer is not None:
                timer.cancel()
            if answer.error is not None:
                # A failure is not an answer: sent again, the call is tried again.
                self._index.forget(answer)
            self._trim()

    def _trim(self) -> None:
        kept = [answer for answer in self._index.values() if answer.ended]
        while len(kept) > _KEPT_ANSWERS or sum(answer.size for answer in kept) > _KEPT_BYTES:
            self._index.forget(kept.pop(0))


Value = TypeVar("Value")


class KeyReusedError(RollmeshError):
    """An Idempotency-Key came again with another body."""

    status = 422
    code = "idempotency_key_reused"

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used for another body", "give every new call a key of its own")


@dataclass(frozen=True, slots=True)
class RequestKey:
    """By what a retry is recognised. `body`: a digest of route and body. `retry`: how often its client sent it before.

    `call`: the name that the gateway gave it, the same for each server that it tries.
    """

    body: bytes
    key: str | None = None
    retry: int = 0
    call: str | None = None


@dataclass(slots=True, eq=False)
class _Known(Generic[Value]):
    request_key: RequestKey
    value: Value
    claimed: int


class IdempotencyIndex(Generic[Value]):
    """Finds the earlier call of a session that a retry repeats. Pure.

    | the call carries          | it is                                                                          |
    |---------------------------|--------------------------------------------------------------------------------|
    | the gateway's call id     | the call that carried the same id before                                       |
    | an Idempotency-Key        | the call that carried the same key before; with another body an error          |
    | the SDK's retry count ≥ 1 | the oldest call of the same body that no retry of that count has claimed yet   |
    | none of them              | a new sample, also when the body is the same: siblings share prompts           |

    So two agents that send the same body at the same time and both retry each get their own answer back.
    """

    def __init__(self) -> None:
        self._known: list[_Known[Value]] = []

    def __len__(self) -> int:
        return len(self._known)

    def find(self, request_key: RequestKey) -> Value | None:
        """What was added for the call that this one repeats; None for a new one. Raises KeyReusedError."""
        if request_key.call is not None:
            for known in self._known:
                if known.request_key.call == request_key.call:
                    return known.value
        if request_key.key is not None:
            for known in self._known:
                if known.request_key.key == request_key.key:
                    if known.request_key.body != request_key.body:
                        raise KeyReusedError(request_key.key)
                    return known.value
            return None
        if request_key.retry < 1:
            return None
        for known in self._known:
            if (
                known.request_key.key is None
                and known.request_key.body == request_key.body
                and known.claimed < request_key.retry
            ):
                known.claimed = request_key.retry
                return known.value
        return None

    def named(self, call: str | None) -> bool:
        """Whether a call of this name is known."""
        return call is not None and any(known.request_key.call == call for known in self._known)

    def add(self, request_key: RequestKey, value: Value) -> None:
        self._known.append(_Known(request_key, value, request_key.retry))

    def forget(self, value: Value) -> None:
        self._known = [known for known in self._known if known.value is not value]

    def values(self) -> list[Value]:
        return [known.value for known in self._known]
