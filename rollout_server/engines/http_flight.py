"""One request on its way: what was drawn for it, who reads it, and the task that listens to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rollout_server.engines.base import GenerationDelta, GenerationRequest
from rollout_server.engines.delta_streams import DeltaStream
from rollout_server.engines.http_flow import Flow
from services.wire.errors import RollmeshError


class Flight:
    """`flow` is None until the request may be sent. `ended`: its reader has, or will have, the last delta or an error."""

    def __init__(self, request: GenerationRequest, stream: DeltaStream) -> None:
        self.request = request
        self.flow: Flow | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self._stream = stream
        self._thawed = asyncio.Event()
        self._thawed.set()

    @property
    def running(self) -> int:
        """Samples that draw."""
        return 0 if self.flow is None or self.ended else self.flow.begun

    def put(self, deltas: Iterable[GenerationDelta]) -> None:
        for delta in deltas:
            self._stream.put(delta)

    def abort(self) -> None:
        """End it with what has come. What the engine drew and has not sent yet was never seen by anybody."""
        flow = self.flow or Flow(self.request, 0, ())
        self.ended = True
        self.put(flow.abort())
        if self.task is not None:
            self.task.cancel()
        self.thaw()

    def fail(self, error: RollmeshError) -> None:
        """End it with `error`, once what has come is read."""
        self.ended = True
        self._stream.fail(error)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.thaw()

    def freeze(self) -> None:
        """What still comes is handed out after `thaw`."""
        if not self.ended:
            self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def thawed(self) -> None:
        await self._thawed.wait()
