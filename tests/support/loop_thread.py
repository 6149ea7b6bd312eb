"""An event loop on a thread of its own: what tests that have none (those that drive a browser) run services in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

_WITHIN_S = 30.0
T = TypeVar("T")


class LoopThread:
    """Runs coroutines on its thread, one call after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="services of a test", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WITHIN_S)
        self._loop.close()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What it comes to. Raises what it raises, and TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_WITHIN_S)

    @contextmanager
    def during(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An async context manager as one that is not. It is entered and left in one task, as those of anyio must be."""
        leave = asyncio.Event()

        async def hold(entered: asyncio.Future[T]) -> None:
            async with context as value:
                entered.set_result(value)
                await leave.wait()

        async def enter() -> tuple[T, asyncio.Task[None]]:
            entered = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(hold(entered))
            await asyncio.wait({task, entered}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            return entered.result(), task

        value, task = self.call(enter())
        try:
            yield value
        finally:

            async def end() -> None:
                leave.set()
                await task

            self.call(end())
