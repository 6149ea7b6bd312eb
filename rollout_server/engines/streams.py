"""Token streams of requests in flight: the engine puts deltas in, each request's reader awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollout_server.engines.base import GenerationDelta, Outcome, joined
from services.wire.errors import ConflictError, RollmeshError


class DeltaStream:
    """The deltas of one request, awaited by one reader: the first at once, then what came in `gather_s`, and each end.

    put   a ─── b c ─ d ──────── end        next   a ─────── bcd ──── end
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._deltas: list[GenerationDelta] = []
        self._error: RollmeshError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._due = 0.0
        """When the next deltas are given out, by the event loop's clock, unless a sample ends."""
        self._ends = False
        self._timer: asyncio.TimerHandle | None = None

    async def next(self) -> list[GenerationDelta]:
        """One delta of each sample that has new tokens. Raises the request's error once its deltas are read."""
        loop = asyncio.get_running_loop()
        try:
            while not self._ready(loop):
                if self._error is not None:
                    raise self._error
                self._reader = loop.create_future()
                if self._deltas:
                    self._wake_when_due(loop)
                await self._reader
        finally:
            self._reader = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        deltas, self._deltas, self._ends = self._deltas, [], False
        self._due = loop.time() + self._gather_s
        return joined(deltas)

    def put(self, delta: GenerationDelta) -> None:
        self._deltas.append(delta)
        self._ends = self._ends or delta.finish_reason is not None
        if self._reader is None:
            return
        loop = self._reader.get_loop()
        if self._ready(loop):
            self._wake()
        else:
            self._wake_when_due(loop)

    def fail(self, error: RollmeshError) -> None:
        self._error = error
        self._wake()

    def flush(self) -> None:
        """Give out now what there is."""
        self._due = 0.0
        if self._deltas:
            self._wake()

    def _wake_when_due(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _ready(self, loop: asyncio.AbstractEventLoop) -> bool:
        return bool(self._deltas) and (self._ends or self._error is not None or loop.time() >= self._due)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class DeltaStreams:
    """The streams of all requests, by request id. Used on the event loop only."""

    def __init__(self) -> None:
        self._streams: dict[str, DeltaStream] = {}

    @contextmanager
    def open(self, request_id: str, gather_s: float) -> Iterator[DeltaStream]:
        """A stream for the time of the block, `gather_s` as the request has it.

        Raises ConflictError for an id that is in flight.
        """
        if request_id in self._streams:
            raise ConflictError(f"request {request_id!r} is already in flight", "give every request an id of its own")
        stream = self._streams[request_id] = DeltaStream(gather_s)
        try:
            yield stream
        finally:
            del self._streams[request_id]

    def deliver(self, outcomes: Sequence[Outcome]) -> None:
        """Hand outcomes to their readers; those of a request that nobody reads any more are dropped."""
        for outcome in outcomes:
            stream = self._streams.get(outcome.request_id)
            if stream is None:
                continue
            if isinstance(outcome, GenerationDelta):
                stream.put(outcome)
            else:
                stream.fail(outcome.error)

    async def flush(self) -> None:
        """Give out now what there is: when this returns, each reader that waited has read it."""
        for stream in self._streams.values():
            stream.flush()
        await asyncio.sleep(0)

    def fail_all(self, error: RollmeshError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
