"""A bound on request bodies, so that one call cannot take a service's memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.wire.errors import BodyTooLargeError


class BodyLimit:
    """ASGI middleware: reading more than `limit_bytes` of a body raises BodyTooLargeError, which is answered as any other.

    A body whose length is declared is refused at its first read, before anything of it is held.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        read = 0

        async def receive_some() -> Message:
            nonlocal read
            if declared.isdigit() and int(declared) > self._limit_bytes:
                raise BodyTooLargeError(self._limit_bytes)
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit_bytes:
                raise BodyTooLargeError(self._limit_bytes)
            return message

        await self._app(scope, receive_some, send)
