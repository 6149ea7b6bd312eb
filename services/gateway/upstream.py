"""HTTP client to rollout servers: one try of a call, which is answered or fails so that another try may succeed."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO

import aiohttp
import msgspec
from aiohttp.abc import ResolveResult
from yarl import URL

from services.gateway.request import ProxiedCall
from services.gateway.servers import Server
from services.policies.blame import Loss, is_suspect
from services.security.addresses import AddressRefusedError, check_resolved
from services.security.connections import kept_connections
from services.security.tls import PUBLIC, Trust
from services.wire.error_answer import typed_error
from services.wire.errors import (
    UNDECODABLE,
    DrainingError,
    HeldElsewhereError,
    NotReadyError,
    RollmeshError,
    UsageError,
)
from services.wire.gateway_api import OWNER_URL_HEADER

_CONNECT_WITHIN_S = 2.0
# Shorter than servers keep idle connections: whoever closes first must be the one who would reuse it.
_KEEP_ALIVE_S = 30.0
_ASK_WITHIN = aiohttp.ClientTimeout(total=5.0)
_LARGE_BODY = 1 << 18
_PASSING = (NotReadyError.code, DrainingError.code)


class TryFailedError(RollmeshError):
    """A try failed and the call may be sent again, to `owner_url` where the server names one.

    `server_id`: where it was tried. `loss`: how the server was lost, where the call may be why.
    """

    status = 502

    def __init__(self, why: str, owner_url: str | None = None, loss: Loss | None = None) -> None:
        super().__init__(why)
        self.owner_url = owner_url
        self.loss = loss
        self.server_id: str | None = None


class ErrorDetail(msgspec.Struct):
    """The fields of an error answer that the gateway reads."""

    code: str = ""
    message: str = ""


class _Error(msgspec.Struct):
    error: ErrorDetail


_error = msgspec.json.Decoder(_Error)


class _CheckedResolver(aiohttp.ThreadedResolver):
    """Looks names up as usual. Raises OSError where one leads to an address that is not called."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        try:
            check_resolved(host, [each["host"] for each in found])
        except AddressRefusedError as error:
            raise OSError(errno.EACCES, str(error)) from error
        return found


class Upstream:
    """Sends calls to servers over kept connections. An async context manager. `trust`: whose certificates it takes."""

    def __init__(self, trust: Trust = PUBLIC) -> None:
        self._trust = trust

    async def __aenter__(self) -> Upstream:
        # aiohttp's client costs a tenth of httpx's CPU a call; what it would add or change by itself is turned off.
        self._session = aiohttp.ClientSession(
            connector=kept_connections(self._trust.verify, _KEEP_ALIVE_S, _CheckedResolver()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def sending(self, server: Server, call: ProxiedCall) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's answer, its head read, its body not; only one that is worth telling the agent.

        There is no time limit on an answer, a generation takes as long as it takes: the wait ends with the server's lease,
        or when the agent hangs up. Raises TryFailedError, also for what happens while the block reads the body.
        """
        url = self._trusted(server)
        limit = asyncio.timeout(None)
        sent, answered = time.monotonic(), False
        try:
            async with limit:
                with server.trying(limit, call):
                    async with self._session.request(
                        call.method,
                        URL(url + call.target, encoded=True),
                        data=_payload(call.body),
                        headers=call.headers,
                        allow_redirects=False,
                    ) as response:
                        answered = True
                        await _refuse_passing(response)
                        yield response
        except aiohttp.ClientConnectorError as error:
            server.avoid()
            if (refused := self._trust.refusal(url, error)) is not None:
                # Another server may be who it says: this one alone is not called again at once.
                raise TryFailedError(str(refused)) from error
            raise TryFailedError(f"no connection ({error.os_error.strerror or error.os_error})") from error
        except aiohttp.ServerTimeoutError as error:
            server.avoid()
            raise TryFailedError(f"no connection within {_CONNECT_WITHIN_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not limit.expired():
                raise
            expired = limit.expired()
            why = "its lease ran out" if expired else f"the connection broke ({str(error) or repr(error)})"
            loss: Loss | None = None
            if not answered and is_suspect(sent, server.heard) and (server.stands_still or not expired):
                loss = "lease" if expired else "connection"
            raise TryFailedError(why, loss=loss) from error

    async def ask(self, server: Server, method: str, path: str, authorization: str | None) -> bytes:
        """The gateway's own question to a server. Raises the typed error that it answers, RollmeshError for no answer."""
        url = f"{self._trust.address(server.record.url)}{path}"
        headers = {} if authorization is None else {"Authorization": authorization}
        body: dict[str, str] | None = {} if method == "POST" else None
        try:
            async with self._session.request(method, url, json=body, headers=headers, timeout=_ASK_WITHIN) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if (refused := self._trust.refusal(server.record.url, error)) is not None:
                raise refused from error
            raise RollmeshError(f"server {server.name} did not answer {url} ({error!r})", "see its log") from error
        if response.status >= 400:
            raise typed_error(f"{method} {url}", response.status, response.headers.get("Retry-After"), content)
        return content

    def _trusted(self, server: Server) -> str:
        """The server's address. Raises TryFailedError for one of plain HTTP where the mesh speaks TLS."""
        try:
            return self._trust.address(server.record.url)
        except UsageError as error:
            server.avoid()
            raise TryFailedError(str(error)) from error


def _payload(body: bytes) -> bytes | BytesIO | None:
    """A large body is sent in parts: in one piece the connection would keep a copy of what it has not yet sent."""
    if len(body) > _LARGE_BODY:
        return BytesIO(body)
    return body or None


async def _refuse_passing(response: aiohttp.ClientResponse) -> None:
    """Raise TryFailedError for an answer that says: not here, or not now."""
    status = response.status
    if status < 421 or status not in (HeldElsewhereError.status, 502, 503):
        return
    if status == HeldElsewhereError.status:
        raise TryFailedError("another server holds the session", response.headers.get(OWNER_URL_HEADER))
    detail = error_detail(await response.read())
    if status == 502 or detail.code in _PASSING:
        raise TryFailedError(f"it answered {status} ({detail.message or response.reason})")


def error_detail(body: bytes) -> ErrorDetail:
    """Empty for an answer that is no error of ours."""
    try:
        return _error.decode(body).error
    except UNDECODABLE:
        return ErrorDetail()


def rest_refused(status: int, body: bytes) -> RollmeshError:
    """For an agent that has a part of an answer, the rest of which no server will make."""
    said = error_detail(body).message or body[:500].decode(errors="replace")
    return RollmeshError(f"the rest of the answer was refused with {status} ({said})", "send the call again")
