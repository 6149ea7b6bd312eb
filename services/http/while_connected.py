"""Work for a caller, which ends when the caller goes away: it closes its connection, or gives one of several calls up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from services.host.aio import Repeated
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
    watch = _Watch(check)
    checking = None if check is None or check_every_s is None else Repeated(watch.look, check_every_s)
    caller.on_gone.add(watch.gone)
    try:
        result = await work
    except BaseException as error:
        if watch.why is None or (watch.task.uncancel() and isinstance(error, asyncio.CancelledError)):
            raise  # its own, or it is cancelled by others too
        raise watch.why from None
    finally:
        caller.on_gone.discard(watch.gone)
        if checking is not None:
            checking.stop()
    if watch.why is not None:  # while its answer was being written down: nobody gets it
        watch.task.uncancel()
        raise watch.why
    return result


class _Watch:
    """Cancels the task that makes it, once, when the caller goes away or `check` raises; `why` says which."""

    # Not of nested functions: they would hold the task, and it them, which only the garbage collector ends.
    __slots__ = ("_check", "task", "why")

    def __init__(self, check: Callable[[], None] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.why: Exception | None = None
        self._check = check

    def gone(self) -> None:
        self._end(ClientGoneError("the client disconnected"))

    def look(self) -> None:
        assert self._check is not None
        try:
            self._check()
        except Exception as error:  # noqa: BLE001 - raised to the caller of `until_gone`
            self._end(error)

    def _end(self, error: Exception) -> None:
        if self.why is None:
            self.why = error
            self.task.cancel()
