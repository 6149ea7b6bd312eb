"""Server-sent events that stop generating when the client disconnects, also while there is nothing to send.

Starlette's `StreamingResponse` notices a disconnect only at the next chunk (there may be none for minutes: the engine is
paused), and leaves the iterator to the garbage collector.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from services.wire.errors import RollmeshError


class BrokenOffError(Exception):
    """The stream ends here without its end: the gateway sees the connection close, and asks another server for the rest."""


class EventStream(Response):
    """Server-sent events from `events`, which is closed in any case, before this returns."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            pump.cancel()
            await asyncio.wait({pump})
            await self._events.aclose()
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                if chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except BrokenOffError:
            return  # the server closes the connection of an answer that was not completed
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(request.receive))
    try:
        while not task.done():
            await asyncio.wait({task, watch}, timeout=check_every_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                break
            if watch.done():
                raise ClientGoneError("the client disconnected")
            if check is not None:
                check()
        result = task.result()
        if watch.done():  # while its answer was being written down: nobody gets it
            raise ClientGoneError("the client disconnected")
        return result
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
