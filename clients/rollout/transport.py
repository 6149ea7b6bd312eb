"""HTTP transport of the async clients, over aiohttp: kept connections, and retries where a repeated call is safe.

call(Call) ──► sent ──► its typed answer
                └──► unreachable, 429, 503 ──► sent again, with pauses, until patience is over

Sent again, with back-off, until the client's patience is over: connections that could not be made or broke, 429 (after its
Retry-After) and 503. Whatever the number of attempts, the call takes effect once (`clients.rollout.calls`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_delay, wait_random_exponential
from yarl import URL

from clients.rollout.calls import AnswerT, Call, new_call_name
from clients.rollout.joined_calls import CallJoiner, NotJoinedError
from services.observability.tracing import NO_TRACING, Tracing
from services.security.connections import kept_connections
from services.security.tls import PUBLIC, Trust, Verify
from services.wire.error_answer import typed_error
from services.wire.errors import CapacityError, NotReadyError, RollmeshError
from services.wire.gateway_api import CALL_HEADER
from services.wire.joined_calls import PATH, JoinedAnswer

# Servers close connections that were idle for 5 s. The client must close first, or a call may hit a closing one.
_KEEP_ALIVE_S = 3.0
OUTAGE_S = 60.0
"""How long the one address of a mesh may be away before what was asked of it is lost. A gateway is back in seconds, a
rollout server when it has loaded its model; both answer the same call as if nothing had happened."""
_UNSAID = ("Accept", "Accept-Encoding", "User-Agent")
"""Headers that no service of the mesh reads; answers are taken as they are, never compressed."""
_NOT_KNOWN = (404, 405)
HttpSession = aiohttp.ClientSession


class Transport:
    """One service. Use as an async context manager; any number of calls may be in flight."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        patience_s: float,
        waits_for_admission: bool = True,
        trust: Trust = PUBLIC,
        more_errors: tuple[type[RollmeshError], ...] = (),
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`patience_s` bounds the time spent on repeating one call; `more_errors`: those that only this service raises.

        `waits_for_admission`: whether one that is answered 429 is repeated too.
        `trust`: whose certificate the service may show. Raises UsageError for plain HTTP where the mesh speaks TLS.
        """
        self.url, self.trust = trust.address(url), trust
        self._patience_s = patience_s
        self._worth_repeating = worth_repeating if waits_for_admission else _unreachable
        self._headers = headers(api_key)
        self._tracing = tracing
        self._more_errors = more_errors
        self._session: aiohttp.ClientSession | None = None
        # Each call of a trace says where in it it belongs.
        self._joiner = CallJoiner(self._post, self._send, self._refused, self._broken, off=tracing.on)

    async def __aenter__(self) -> Transport:
        connector = kept_connections(self.trust.verify, _KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_UNSAID,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._joiner.close()
        if self._session is not None:
            await self._session.close()

    async def call(self, call: Call[AnswerT], patience_s: float | None = None) -> AnswerT:
        """The answer. `patience_s` overrides the client's. Raises the service's typed errors, ServerUnreachableError.

        UntrustedError, at once, where `trust` does not take the certificate of who answers.
        """
        try:
            # The common case: tenacity's retry loop would cost half as much again as the call.
            content = await self._joiner.send(call)
        except RollmeshError as error:
            patience_s = self._patience_s if patience_s is None else patience_s
            pause_s = first_pause_s(error)
            if not self._worth_repeating(error) or pause_s > patience_s:
                raise
            await asyncio.sleep(pause_s)
            content = await self._repeat(call, patience_s - pause_s)
        return call.read(self.url, content)

    async def _repeat(self, call: Call[AnswerT], patience_s: float) -> bytes:
        retrying = AsyncRetrying(
            retry=retry_if_exception(self._worth_repeating),
            wait=pause,
            stop=stop_after_delay(patience_s),
            reraise=True,
        )
        content: bytes = await retrying(self._send, call)
        return content

    async def _send(self, call: Call[AnswerT]) -> bytes:
        """One call, alone."""
        with self._failures(call.timeout_s):
            async with self._open.request(
                call.method,
                URL(f"{self.url}{call.path}", encoded=True),
                headers=call.headers | self._tracing.headers(),
                data=call.payload,
                timeout=aiohttp.ClientTimeout(total=call.timeout_s),
            ) as response:
                content = await response.read()
        if response.status < 400:
            return content
        raise self._error(call, response.status, response.headers.get("Retry-After"), content)

    @asynccontextmanager
    async def _post(self, body: bytes, timeout_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """`clients.rollout.joined_calls.Post`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        with self._failures(timeout_s):
            async with self._open.post(f"{self.url}{PATH}", data=body, timeout=timeout) as response:
                if response.status in _NOT_KNOWN:
                    raise NotJoinedError(f"{self.url} has no {PATH}")
                if response.status >= 400:
                    content, retry_after = await response.read(), response.headers.get("Retry-After")
                    what = f"POST {self.url}{PATH}"
                    raise typed_error(what, response.status, retry_after, content, self._more_errors)
                yield response.content.iter_any()

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client as an async context manager: async with …Client(url) as client")
        return self._session

    @contextmanager
    def _failures(self, timeout_s: float) -> Iterator[None]:
        """Raises UntrustedError and ServerUnreachableError for what aiohttp raises."""
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            if (refused := self.trust.refusal(self.url, error)) is not None:
                raise refused from error
            raise ServerUnreachableError(self.url, str(error.os_error.strerror), sent=False) from error
        except aiohttp.ClientError as error:
            raise self._broken(str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise self._broken(f"no answer in {timeout_s:g} s") from error

    def _broken(self, why: str) -> ServerUnreachableError:
        return ServerUnreachableError(self.url, why, sent=True)

    def _refused(self, call: Call[Any], answer: JoinedAnswer) -> RollmeshError:
        return self._error(call, answer.status, answer.retry_after, bytes(answer.body))

    def _error(self, call: Call[Any], status: int, retry_after: str | None, content: bytes) -> RollmeshError:
        return typed_error(f"{call.method} {self.url}{call.path}", status, retry_after, content, self._more_errors)


def open_session(verify: Verify) -> HttpSession:
    """Connections for `post_json`. An async context manager."""
    return aiohttp.ClientSession(connector=kept_connections(verify))


async def post_json(
    http: HttpSession,
    url: str,
    body: Mapping[str, Any],
    api_key: str,
    timeout_s: float,
    more_errors: tuple[type[RollmeshError], ...] = (),
    patience_s: float = OUTAGE_S,
) -> bytes:
    """The body of the answer to one POST; while the service is away it is sent again, as the same call.

    Raises the service's typed errors, ServerUnreachableError, TimeoutError, aiohttp's own for a certificate.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    named = headers(api_key) | {CALL_HEADER: new_call_name()}

    async def send() -> bytes:
        try:
            async with http.post(url, json=body, headers=named, timeout=timeout) as response:
                content = await response.read()
        except (aiohttp.ClientSSLError, TimeoutError):
            raise
        except aiohttp.ClientError as error:
            sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise ServerUnreachableError(url, str(error) or type(error).__name__, sent=sent) from error
        if response.status >= 400:
            retry_after = response.headers.get("Retry-After")
            raise typed_error(f"POST {url}", response.status, retry_after, content, more_errors)
        return content

    retrying = AsyncRetrying(
        retry=retry_if_exception(_unreachable), wait=pause, stop=stop_after_delay(patience_s), reraise=True
    )
    content: bytes = await retrying(send)
    return content


def headers(api_key: str | None) -> dict[str, str]:
    """What every request of a client says."""
    kind = {"Content-Type": "application/json"}
    return kind if api_key is None else kind | {"Authorization": f"Bearer {api_key}"}


# Shared with the synchronous client.
_FIRST_PAUSE_S = 0.02
_back_off = wait_random_exponential(multiplier=0.05, max=0.3)


class ServerUnreachableError(RollmeshError):
    """No connection, or one that broke. `sent`: the request may have arrived and been carried out."""

    status = 502
    code = "unreachable"

    def __init__(self, url: str, why: str, *, sent: bool) -> None:
        super().__init__(f"{url} cannot be reached ({why})", "see whether it runs and is ready")
        self.sent = sent


def worth_repeating(error: BaseException) -> bool:
    """Whether a call that failed with `error` is sent again."""
    return isinstance(error, CapacityError) or _unreachable(error)


def _unreachable(error: BaseException) -> bool:
    return isinstance(error, ServerUnreachableError | NotReadyError)


def first_pause_s(error: RollmeshError) -> float:
    """How long to wait before the second attempt."""
    return error.retry_after_s if isinstance(error, CapacityError) else _FIRST_PAUSE_S


def pause(state: RetryCallState) -> float:
    """How long tenacity waits before each later attempt."""
    error = state.outcome.exception() if state.outcome is not None else None
    return error.retry_after_s if isinstance(error, CapacityError) else _back_off(state)
