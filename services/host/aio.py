"""Asyncio helpers: a quick event loop, a task group's first error, work that no cancellation interrupts, locks by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from services.wire.errors import RollmeshError

T = TypeVar("T")
TELL_EVERY_S = 30.0
"""Of work that takes long is told so often."""


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which takes half of what asyncio's own does for a call, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextmanager
def first_failure() -> Iterator[None]:
    """Around a task group: where its tasks raised RollmeshErrors and nothing else, raises the first, however nested.

    Not by `except*`: before Python 3.11.4 what that raises comes out as a group again.
    """
    try:
        yield
    except BaseExceptionGroup as failures:
        known, others = failures.split(RollmeshError)
        if known is None or others is not None:
            raise
        raise _first(known) from None


def _first(failures: BaseExceptionGroup[RollmeshError]) -> RollmeshError:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` until it is done, also where the wait is cancelled: that is raised afterwards. Raises what it raises."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def telling(work: Awaitable[T], tell: Callable[[float], None], every_s: float = TELL_EVERY_S) -> T:
    """The result of `work`; meanwhile `tell` is called every `every_s` seconds, with how many have passed."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    repeated = Repeated(lambda: tell(loop.time() - began), every_s)
    try:
        return await work
    finally:
        repeated.stop()


class Repeated:
    """Calls `call` every `every_s` seconds, until it is stopped.

    No task, which costs more than many a call does that it is for; and no nested functions: one that names itself would be
    garbage, with all that it holds, that only the collector finds.
    """

    __slots__ = ("_call", "_every_s", "_loop", "_timer")

    def __init__(self, call: Callable[[], None], every_s: float) -> None:
        self._call, self._every_s = call, every_s
        self._loop = asyncio.get_running_loop()
        self._wait()

    def stop(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._due)

    def _due(self) -> None:
        self._wait()
        self._call()


class NamedLocks:
    """Asyncio locks by name, each kept while it is in use. For one event loop."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Mutual exclusion of blocks with the same name."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            users = self._locks[name][1] - 1
            if users:
                self._locks[name] = lock, users
            else:
                del self._locks[name]
