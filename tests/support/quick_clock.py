"""An event loop whose clock jumps to whatever is due next: ten minutes pass in a moment, deadlines fall due in order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class QuickLoop(asyncio.SelectorEventLoop):
    """For work that waits for time and for other tasks alone: what comes of sockets and threads would never arrive."""

    def __init__(self) -> None:
        self.passed = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.passed


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: QuickLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is due any more: the work waits for something that never comes")
        self._loop.passed += timeout
        return super().select(0)


def quickly(work: Callable[[], Awaitable[T]]) -> tuple[T, float]:
    """The result of `work()`, and how many seconds it took by its own clock. Raises what it raises."""
    loop = QuickLoop()
    try:
        return loop.run_until_complete(_await(work)), loop.passed
    finally:
        loop.close()


async def _await(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
