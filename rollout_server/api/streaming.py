"""Server-sent events that stop generating when the client disconnects, also while there is nothing to send.

Starlette's `StreamingResponse` notices a disconnect only at the next chunk (there may be none for minutes: the engine is
paused), and leaves the iterator to the garbage collector.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from services.http.connection import Caller, caller_of
from services.wire.errors import RollmeshError


class BrokenOffError(Exception):
    """The stream ends here without its end: the gateway sees the connection close, and asks another server for the rest."""


class LastChunk(bytes):
    """After it nothing comes: it is sent together with the end of the answer."""


class EventStream(Response):
    """Server-sent events from `events`, which is closed in any case, before this returns."""

    media_type = "text/event-stream"
    head_at_once = True
    """Whether the client hears that an answer has begun before there is anything of it."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive
        with suppress(ClientGoneError):
            try:
                await _until_gone(caller_of(scope), self._pump(send))
            finally:
                await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        begun = self.head_at_once
        if begun:
            await self._begin(send)
        try:
            async for chunk in self._events:
                if not begun:
                    begun = True
                    await self._begin(send)
                if isinstance(chunk, LastChunk):
                    await send({"type": "http.response.body", "body": chunk, "more_body": False})
                    return
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except BrokenOffError:
            return  # the server closes the connection of an answer that was not completed
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


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
    return await _until_gone(caller_of(request.scope), work, check, check_every_s)


async def _until_gone(
    caller: Caller,
    work: Coroutine[Any, Any, T],
    check: Callable[[], None] | None = None,
    check_every_s: float | None = None,
) -> T:
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
