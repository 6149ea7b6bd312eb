"""Kept HTTP connections of the weight bus and its clients, which are used at each weight update.

aiohttp's client costs a tenth of httpx's CPU a call. What it would add or change by itself is turned off.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

import aiohttp

from services.security.connections import kept_connections
from services.security.tls import PUBLIC, Trust
from services.wire.error_answer import typed_error
from services.wire.errors import NotReadyError
from weight_bus.errors import StageError, TransportError

_LARGE_BODY = 1 << 20
# vLLM's server closes a connection after five idle seconds: the client must close it first, or reuse may fail.
_KEEP_ALIVE_S = 3.0

FAILURES = (aiohttp.ClientError, OSError)
"""What `Connections.send` raises where nobody answers, or the connection breaks; TimeoutError is one of them."""


class Connections:
    """For one event loop. `headers` go with every call.

    `connect_s`: for a connection; `read_s`: for each part of an answer; None: callers have a deadline of their own.
    """

    def __init__(
        self,
        key: str | None = None,
        trust: Trust = PUBLIC,
        *,
        connect_s: float | None = None,
        read_s: float | None = None,
    ) -> None:
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._trust = trust
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=read_s)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def send(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        read_s: float | None = None,
    ) -> bytes:
        """The body of the answer. `read_s`: of this call, where its answer takes longer than others'. Raises one of
        FAILURES, and the typed error that was answered."""
        sent = {**self.headers, **(headers or {})}
        # A large one in parts: in one piece the connection would keep a copy of what it has not sent yet.
        data = body if body is None or len(body) < _LARGE_BODY else BytesIO(body)
        waiting = self._timeout
        if read_s is not None:
            waiting = aiohttp.ClientTimeout(total=None, sock_connect=waiting.sock_connect, sock_read=read_s)
        call = self._opened().request(method, url, data=data, headers=sent, allow_redirects=False, timeout=waiting)
        async with call as answer:
            content = await answer.read()
        if not 200 <= answer.status < 300:
            retry_after = answer.headers.get("Retry-After")
            raise typed_error(url, answer.status, retry_after, content, (StageError, TransportError))
        return content

    async def close(self) -> None:
        """No call can be made any more."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise NotReadyError("this client is closed", "make a new one")
        if self._session is None:
            # Made here: it belongs to the loop that it is made on, and clients are made before theirs runs.
            self._session = aiohttp.ClientSession(
                connector=kept_connections(self._trust.verify, _KEEP_ALIVE_S),
                timeout=self._timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        return self._session
