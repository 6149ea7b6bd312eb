"""Token streams of requests in flight: the engine puts deltas in, each request's reader awaits them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout_server.engines.base import GenerationDelta
from services.wire.errors import ConflictError, RollmeshError

if TYPE_CHECKING:  # it imports torch, which an engine behind a URL does without
    from rollout_server.engines.torch.scheduler import Outcome


class DeltaStream:
    """The deltas of one request, awaited by one reader."""

    def __init__(self) -> None:
        self._deltas: list[GenerationDelta] = []
        self._error: RollmeshError | None = None
        self._reader: asyncio.Future[None] | None = None

    async def next(self) -> list[GenerationDelta]:
        """At least one delta, all that are there. Raises the request's error once its deltas are read."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        deltas, self._deltas = self._deltas, []
        return deltas

    def put(self, delta: GenerationDelta) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: RollmeshError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class DeltaStreams:
    """The streams of all requests, by request id. Used on the event loop only."""

    def __init__(self) -> None:
        self._streams: dict[str, DeltaStream] = {}

    @contextmanager
    def open(self, request_id: str) -> Iterator[DeltaStream]:
        """A stream for the time of the block. Raises ConflictError for an id that is in flight."""
        if request_id in self._streams:
            raise ConflictError(f"request {request_id!r} is already in flight", "give every request an id of its own")
        stream = self._streams[request_id] = DeltaStream()
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

    def fail_all(self, error: RollmeshError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
