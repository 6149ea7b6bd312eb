"""Reverse proxy of the agents' paths, as one ASGI application: read the call, send it on, pass the answer on as it comes.

No route, no model, no parsing of what is passed through: a call costs the two HTTP parsers and little more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.request import ProxiedCall, SessionIndex, is_proxied, read_call
from services.gateway.response import DownstreamResponse
from services.gateway.retry import Failover
from services.gateway.router import Router
from services.gateway.servers import Server
from services.gateway.stateless_generate import StatelessCalls
from services.gateway.undelivered import Undelivered
from services.gateway.upstream import rest_refused
from services.wire.errors import RollmeshError

_WHOLE_BYTES = 1 << 20
"""Answers of a known length up to this are passed on in one piece: a try that breaks off then leaves no trace."""


class Proxy:
    """Passes one agent's call on and its answer back."""

    def __init__(self, failover: Failover, router: Router, sessions: SessionIndex, undelivered: Undelivered) -> None:
        self._failover = failover
        self._router = router
        self._sessions = sessions
        self._undelivered = undelivered
        self._stateless = StatelessCalls(failover)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        agent = DownstreamResponse(send)
        try:
            call = read_call(scope, await _read_body(receive))
            await self._undelivered.check_written(call)
            try:
                async with until_hung_up(receive):
                    if call.may_name_nothing and not await self._sessions.holds(call.session_id or ""):
                        call.session_id = None
                    await (self._stateless.answer(call, agent) if call.is_stateless else self._pass(call, agent))
            except (AgentGoneError, RollmeshError):
                # What an agent saw a part of stays. Of the rest, nothing is trained: said before the agent can go on.
                if not agent.passed_on:
                    await self._undelivered.note(call)
                raise
        except AgentGoneError:
            return
        except RollmeshError as error:
            # An answer that can no longer say so is cut: our server closes the connection of one that does not end.
            await agent.fail(error)

    async def _pass(self, call: ProxiedCall, agent: DownstreamResponse) -> None:
        async def hand_on(server: Server, response: ClientResponse) -> None:
            length = response.content_length
            if call.opens or (length is not None and length <= _WHOLE_BYTES):
                body = await response.read()
                if call.opens and response.status < 300:
                    self._router.opened(server, body)
                await _finish(response, body, agent)
            else:
                await _stream(response, agent)

        await self._failover.deliver(call, hand_on, lambda: agent.passed_on)


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
    repetition = agent.later_try()
    async for chunk in response.content.iter_any():
        new = repetition.new_part(chunk)
        if new:
            # Only now: an answer that breaks off before its first byte may yet become another one.
            if not agent.begun:
                await agent.begin(response.status, response.raw_headers)
            await agent.pass_on(new)
    repetition.check_reached()
    await agent.begin(response.status, response.raw_headers)
    await agent.end()


async def _check_goes_on(response: ClientResponse, agent: DownstreamResponse) -> None:
    """Raise RollmeshError where a later try is refused after the agent has a part of the answer."""
    if agent.begun and response.status >= 300:
        raise rest_refused(response.status, await response.read())


async def _read_body(receive: Receive) -> bytes:
    """The whole body. Raises what bounds it, and AgentGoneError where it breaks off."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise AgentGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class AgentGoneError(Exception):
    """The agent disconnected before it had its answer."""


@asynccontextmanager
async def until_hung_up(receive: Receive) -> AsyncIterator[None]:
    """Run the block; raises AgentGoneError as soon as the agent disconnects, so that the server stops generating too.

    The request's body must have been read.
    """
    limit = asyncio.timeout(None)
    gone = done = False

    def on_message(watch: asyncio.Future[Message]) -> None:
        # With the body read, the only message that can come is that the agent is gone, or has its whole answer.
        nonlocal gone
        if not watch.cancelled() and not done:
            gone = True
            limit.reschedule(asyncio.get_running_loop().time())

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(on_message)
    try:
        async with limit:
            try:
                yield
            finally:
                done = True
    except TimeoutError as error:
        if gone and limit.expired():
            raise AgentGoneError from error
        raise
    finally:
        watch.cancel()
