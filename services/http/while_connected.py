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
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    why: Exception | None = None
    timer: asyncio.TimerHandle | None = None

    def end(error: Exception) -> None:
        nonlocal why
        if why is None:
            why = error
            task.cancel()

    def look() -> None:
        nonlocal timer
        assert check is not None and check_every_s is not None
        try:
            check()
        except Exception as error:  # noqa: BLE001 - raised to the caller of this function
            end(error)
        else:
            timer = loop.call_later(check_every_s, look)

    def gone() -> None:
        end(ClientGoneError("the client disconnected"))

    if check is not None and check_every_s is not None:
        timer = loop.call_later(check_every_s, look)
    caller.on_gone.add(gone)
    try:
        result = await work
    except BaseException as error:
        if why is None or (task.uncancel() and isinstance(error, asyncio.CancelledError)):
            raise  # its own, or it is cancelled by others too
        raise why from None
    finally:
        caller.on_gone.discard(gone)
        if timer is not None:
            timer.cancel()
    if why is not None:  # while its answer was being written down: nobody gets it
        task.uncancel()
        raise why
    return result
