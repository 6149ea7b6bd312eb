"""Reverse proxy of the agents' paths, as one ASGI application: read the call, send it on, pass the answer on as it comes.

No route, no model, no parsing of what is passed through: a call costs the two HTTP parsers and little more. Calls that come
in one request (`services.wire.joined_calls`) are sent on one by one, each to the server that it belongs to.
"""

from __future__ import annotations

from aiohttp import ClientResponse
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.request import ProxiedCall, SessionIndex, is_proxied, read_call
from services.gateway.response import DownstreamResponse
from services.gateway.retry import Failover
from services.gateway.router import Router
from services.gateway.servers import Server
from services.gateway.stateless_generate import StatelessCalls
from services.gateway.undelivered import Undelivered
from services.gateway.upstream import rest_refused
from services.http.app import error_answer
from services.http.auth import Authorizer
from services.http.connection import Caller, caller_of
from services.http.joined_calls import CallsInOne, Lines, read_given_up, read_joined, scope_of
from services.http.while_connected import ClientGoneError, until_gone
from services.wire.errors import NotFoundError, RollmeshError
from services.wire.joined_calls import GIVEN_UP, JOINED, PATH, JoinedCall, may_be_joined

_WHOLE_BYTES = 1 << 20
"""Answers of a known length up to this are passed on in one piece: a try that breaks off then leaves no trace."""


class Proxy:
    """Passes one agent's call on and its answer back."""

    def __init__(
        self,
        failover: Failover,
        router: Router,
        sessions: SessionIndex,
        undelivered: Undelivered,
        authorizer: Authorizer,
    ) -> None:
        self._authorizer = authorizer
        self._failover = failover
        self._router = router
        self._sessions = sessions
        self._undelivered = undelivered
        self._stateless = StatelessCalls(failover)
        self._joined = CallsInOne(self._one_of_several)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive)
            if scope["path"] in (PATH, GIVEN_UP) and scope["method"] == "POST":
                await self._several(scope, body)(scope, receive, send)
            else:
                await self._one(scope, body, send)
        except ClientGoneError:
            return
        except RollmeshError as error:
            await error_answer(error)(scope, receive, send)

    def _several(self, scope: Scope, body: bytes) -> Response:
        """The answer to calls that came in one request: each is sent on alone, to the server that it belongs to.

        Raises as `Authorizer.require` does, and UsageError for a body that is not what the path takes.
        """
        headers = Headers(scope=scope)
        content_type = headers.get("content-type")
        # The servers judge the key of each call; but what is given up is ended here.
        self._authorizer.require(headers.get("authorization"), "environment")
        if scope["path"] == PATH:
            return Lines(self._joined.answers(read_joined(content_type, body), scope))
        self._joined.give_up(read_given_up(content_type, body))
        return Response(status_code=204)

    async def _one_of_several(self, call: JoinedCall, caller: Caller, scope: Scope) -> Response:
        if not may_be_joined(call.path):
            raise NotFoundError(f"{call.path!r} is no path that {PATH} takes", f"it takes {' and '.join(JOINED)}")
        answer = _Collected()
        await self._one(scope_of(call, caller, scope), bytes(call.body), answer.take)
        return answer.response()

    async def _one(self, scope: Scope, body: bytes, send: Send) -> None:
        agent = DownstreamResponse(send)
        try:
            call = read_call(scope, body)
            await self._undelivered.check_written(call)
            try:
                # Where the agent hangs up, the server stops generating too.
                await until_gone(caller_of(scope), self._answer(call, agent))
            except RollmeshError:
                # What an agent saw a part of stays. Of the rest, nothing is trained: said before the agent can go on.
                if not agent.passed_on:
                    await self._undelivered.note(call)
                raise
        except ClientGoneError:
            return
        except RollmeshError as error:
            # An answer that can no longer say so is cut: our server closes the connection of one that does not end.
            await agent.fail(error)

    async def _answer(self, call: ProxiedCall, agent: DownstreamResponse) -> None:
        if call.may_name_nothing and not await self._sessions.holds(call.session_id or ""):
            call.session_id = None
        await (self._stateless.answer(call, agent) if call.is_stateless else self._pass(call, agent))

    async def _pass(self, call: ProxiedCall, agent: DownstreamResponse) -> None:
        async def hand_on(server: Server, response: ClientResponse) -> None:
            length = response.content_length
            if call.ends and response.status < 300:
                self._router.ended(server, call)
            if call.opens or (length is not None and length <= _WHOLE_BYTES):
                body = await response.read()
                if call.opens and response.status < 300:
                    self._router.opened(server, body)
                await _finish(response, body, agent)
            else:
                await _stream(response, agent)

        await self._failover.deliver(call, hand_on, lambda: agent.passed_on)


class _Collected:
    """An answer that is kept, not sent."""

    def __init__(self) -> None:
        self._status = 0
        self._retry_after: str | None = None
        self._parts: list[bytes] = []
        self._whole = False

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._retry_after = Headers(raw=list(message["headers"])).get("retry-after")
        else:
            self._parts.append(message.get("body", b""))
            self._whole = not message.get("more_body", False)

    def response(self) -> Response:
        """Raises RollmeshError where it broke off."""
        if not self._whole:
            raise RollmeshError("the answer broke off", "send the call again")
        headers = {} if self._retry_after is None else {"retry-after": self._retry_after}
        return Response(b"".join(self._parts), self._status, headers)


class ProxyPaths:
    """ASGI middleware: proxied paths go to the proxy, all others to the application."""

    def __init__(self, app: ASGIApp, proxy: ASGIApp) -> None:
        self._app = app
        self._proxy = proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        proxied = scope["type"] == "http" and is_proxied(scope["path"])
        await (self._proxy if proxied else self._app)(scope, receive, send)


async def _finish(response: ClientResponse, body: bytes, agent: DownstreamResponse) -> None:
    """Pass an answer on in one piece, less what an earlier try has brought."""
    await _check_goes_on(response, agent)
    repetition = agent.later_try()
    new = repetition.new_part(body)
    repetition.check_reached()
    await agent.begin(response.status, response.raw_headers)
    await agent.end(new)


async def _stream(response: ClientResponse, agent: DownstreamResponse) -> None:
    """Pass chunks on as they come, less what an earlier try has brought."""
    await _check_goes_on(response, agent)
    repetition, last = agent.later_try(), b""
    async for chunk in response.content.iter_any():
        new = repetition.new_part(chunk)
        if response.content.at_eof():
            last = new  # it goes with the end
        elif new:
            # Only now: an answer that breaks off before its first byte may yet become another one.
            if not agent.begun:
                await agent.begin(response.status, response.raw_headers)
            await agent.pass_on(new)
    repetition.check_reached()
    await agent.begin(response.status, response.raw_headers)
    await agent.end(last)


async def _check_goes_on(response: ClientResponse, agent: DownstreamResponse) -> None:
    """Raise RollmeshError where a later try is refused after the agent has a part of the answer."""
    if agent.begun and response.status >= 300:
        raise rest_refused(response.status, await response.read())


async def _read_body(receive: Receive) -> bytes:
    """The whole body. Raises what bounds it, and ClientGoneError where it breaks off."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the agent disconnected")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
