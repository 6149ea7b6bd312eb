"""Work for a caller, which ends when the caller goes away: it closes its connection, or gives one of several calls up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from services.http.connection import Caller, caller_of
from services.wire.errors import RollmeshError

T = TypeVar("T")


class ClientGoneError(RollmeshError):
    """The client disconnected before its answer was ready: no client reads this error."""

    status = 499
    code = "client_gone"


async def while_connected(
    request: Request,
    work: Coroutine[Any, Any, T],
    *,
    check: Callable[[], None] | None = None,
    check_every_s: float | None = None,
) -> T:
    """Await `work`, but cancel it (and wait for its end) when the client disconnects first.

    `check` is called every `check_every_s` seconds; what it raises ends the work too. The request's body must have been
    read. Raises ClientGoneError when the client left.
    """
    return await until_gone(caller_of(request.scope), work, check, check_every_s)


async def until_gone(
    caller: Caller,
    work: Coroutine[Any, Any, T],
    check: Callable[[], None] | None = None,
    check_every_s: float | None = None,
) -> T:
    """`while_connected`, of this caller."""
    # In the task of the call: a task for the work and one that waits for the disconnect cost more than many a call does.
    if caller.gone:
        work.close()
        raise ClientGoneError("the client disconnected")
    watch = _Watch(check, check_every_s)
    caller.on_gone.add(watch.gone)
    try:
        result = await work
    except BaseException as error:
        if watch.why is None or (watch.task.uncancel() and isinstance(error, asyncio.CancelledError)):
            raise  # its own, or it is cancelled by others too
        raise watch.why from None
    finally:
        caller.on_gone.discard(watch.gone)
        watch.stop()
    if watch.why is not None:  # while its answer was being written down: nobody gets it
        watch.task.uncancel()
        raise watch.why
    return result


class _Watch:
    """Cancels the task that makes it, once, when the caller goes away or a check raises; `why` says which.

    Not of nested functions: one that names itself, and the task with all that its call held, would be garbage that only
    the collector finds.
    """

    __slots__ = ("_check", "_every_s", "_loop", "_timer", "task", "why")

    def __init__(self, check: Callable[[], None] | None, every_s: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.why: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._check, self._every_s = check, every_s
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def gone(self) -> None:
        self._end(ClientGoneError("the client disconnected"))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        if self._check is not None and self._every_s is not None:
            self._timer = self._loop.call_later(self._every_s, self._look)

    def _look(self) -> None:
        assert self._check is not None
        try:
            self._check()
        except Exception as error:  # noqa: BLE001 - raised to the caller of `until_gone`
            self._end(error)
        else:
            self._wait()

    def _end(self, error: Exception) -> None:
        if self.why is None:
            self.why = error
            self.task.cancel()
