"""Server-sent events that stop generating when the client disconnects, also while there is nothing to send.

Starlette's `StreamingResponse` notices a disconnect only at the next chunk (there may be none for minutes: the engine is
paused), and leaves the iterator to the garbage collector.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import suppress

from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.http.connection import caller_of
from services.http.while_connected import ClientGoneError, until_gone


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
                await until_gone(caller_of(scope), self._pump(send))
            finally:
                await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        begun, more = self.head_at_once, True
        if begun:
            await self._begin(send)
        try:
            async for chunk in self._events:
                if not begun:
                    begun = True
                    await self._begin(send)
                more = not isinstance(chunk, LastChunk)
                if chunk or not more:
                    await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except BrokenOffError:
            return  # the server closes the connection of an answer that was not completed
        if more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
