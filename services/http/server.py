"""uvicorn's server, but for its waits: uvicorn looks ten times a second whether it was told to end, and then waits twice.

told to end ──► takes no more connections ──► calls in flight go on, so long as they may ──► the application is closed
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count

import structlog
import uvicorn

from services.policies.backoff import growing_delay

_DATE_EVERY_S = 1.0
"""The date that answers carry has seconds."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1

_log = structlog.get_logger()


class Server(uvicorn.Server):
    """`on_stop` is called as soon as it is told to end. `takes_signals`: whether SIGTERM and Ctrl-C tell it.

    It is told by `should_exit = True`, also from a signal's handler; `force_exit` gives up whatever is still in flight.
    """

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None], *, takes_signals: bool) -> None:
        self._wake: Callable[[], object] = lambda: None
        super().__init__(config)
        self._on_stop = on_stop
        self._takes_signals = takes_signals

    @property
    def should_exit(self) -> bool:
        return self._should_exit

    @should_exit.setter
    def should_exit(self, told: bool) -> None:
        self._should_exit = told
        if told:
            self._wake()

    def end(self) -> None:
        self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return super().capture_signals() if self._takes_signals else nullcontext()

    async def main_loop(self) -> None:
        told = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, told.set)
        try:
            while not await self.on_tick(0):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_DATE_EVERY_S):
                        await told.wait()
        finally:
            self._wake = lambda: None  # the event loop may be closed when it is told once more

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        in_flight = self.server_state
        for connection in tuple(in_flight.connections):
            connection.shutdown()  # at once where it is idle, else after its answer
        within_s = self.config.timeout_graceful_shutdown
        try:
            async with asyncio.timeout(within_s):
                await self._until_empty(in_flight.connections)
                await self._until_empty(in_flight.tasks)
                if not self.force_exit:
                    await asyncio.gather(*(server.wait_closed() for server in self.servers))
        except TimeoutError:
            _log.error("calls in flight are ended", calls=len(in_flight.tasks), after_s=within_s)
            for task in tuple(in_flight.tasks):
                task.cancel()
        if not self.force_exit:
            await self.lifespan.shutdown()

    async def _until_empty(self, what: Sized) -> None:
        for time in count(1):
            if not what or self.force_exit:
                return
            await asyncio.sleep(growing_delay(time, _FIRST_LOOK_S, _LAST_LOOK_S))
