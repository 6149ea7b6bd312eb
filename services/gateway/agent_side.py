"""The answer as the agent gets it: begun once, by whichever try comes first, and gone on with by the next.

Servers answer a call that is sent again byte for byte, so a later try goes on where the earlier one broke off: what the
agent has already is left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Send

from services.app import error_answer
from services.event_stream import error_event
from services.wire.errors import RollmeshError
from services.wire.mesh_headers import OWNER_URL_HEADER

RawHeaders = Iterable[tuple[bytes, bytes]]

_DROPPED = frozenset(
    (
        # Of the connection, not of the answer (RFC 9110, 7.6.1).
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        # Our own server writes these.
        *(b"date", b"server"),
        OWNER_URL_HEADER.encode(),
    )
)


class AgentSide:
    """One answer. `passed_on`: bytes of the body that the agent has; `begun`: it has status and headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events = False
        self.begun = False
        self.ended = False
        self.passed_on = 0

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Status and headers, unless an earlier try has brought them."""
        if self.begun:
            return
        kept = [(name.lower(), value) for name, value in headers if name.lower() not in _DROPPED]
        self._events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in kept)
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def pass_on(self, chunk: bytes) -> None:
        self.passed_on += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

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
