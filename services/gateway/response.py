"""The response to the agent, which several tries may write: the first begins it, a later one continues it.

Servers repeat the answer to a retried call byte for byte. So a later try leaves out what the agent already has, and checks
it by its checksum: parts of two different answers are never joined.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Iterable

from starlette.types import Send

from services.http.app import error_answer, error_event
from services.wire.errors import RollmeshError
from services.wire.gateway_api import OWNER_URL_HEADER

RawHeaders = Iterable[tuple[bytes, bytes]]

# Hop-by-hop headers (RFC 9110, 7.6.1), and those that our own server writes.
_DROPPED = {
    *b"connection keep-alive proxy-authenticate te trailer transfer-encoding upgrade date server".split(),
    OWNER_URL_HEADER.encode(),
}


class Repetition:
    """The beginning of an answer that is made again: `length` bytes with this checksum, to be left out."""

    def __init__(self, length: int, checksum: int) -> None:
        self._left = length
        self._expected = checksum
        self._checksum = 0

    def new_part(self, chunk: bytes) -> bytes:
        """What the agent does not have yet. Raises RollmeshError where the answer is another one than before."""
        if not self._left:
            return chunk
        known, new = chunk[: self._left], chunk[self._left :]
        self._left -= len(known)
        self._checksum = zlib.crc32(known, self._checksum)
        if not self._left and self._checksum != self._expected:
            raise RollmeshError("a retry gave a different answer", "send the call again")
        return new

    def check_reached(self) -> None:
        """Raise RollmeshError where the answer ended before all that the agent has."""
        if self._left:
            raise RollmeshError("a retry gave a shorter answer", "send the call again")


class DownstreamResponse:
    """One answer. `passed_on`: bytes of the body that the agent has; `begun`: it has status and headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events = False
        self.begun = False
        self.ended = False
        self.passed_on = 0
        self._checksum = 0

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Status and headers, unless an earlier try has brought them."""
        if self.begun:
            return
        kept = [(name.lower(), value) for name, value in headers if name.lower() not in _DROPPED]
        self._events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in kept)
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    def later_try(self) -> Repetition:
        """What leaves out, from an answer made again, that which the agent has."""
        return Repetition(self.passed_on, self._checksum)

    def pass_on(self, chunk: bytes) -> Awaitable[None]:
        """A part of the body. Counted as passed on when this is called: await what it returns at once."""
        self.passed_on += len(chunk)
        self._checksum = zlib.crc32(chunk, self._checksum)
        return self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        self.ended = True
        self.passed_on += len(last)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, error: RollmeshError) -> bool:
        """Tell the agent of a failure; returns False where the answer has begun and cannot hold one."""
        if not self.begun:
            answer = error_answer(error)
            await self.begin(answer.status_code, answer.raw_headers)
            await self.end(bytes(answer.body))
        elif self._events and not self.ended:
            await self.end(error_event(error))
        return self.ended
