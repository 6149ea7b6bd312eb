"""`POST /inference/v1/generate` outside any session: a draw that breaks off is continued from its own tokens.

No server keeps such a draw, so sending the call again would draw something else. What has come is put behind the prompt
instead, and the rest is asked for; the agent sees one answer, never `finish_reason: "abort"`.

    whole answer:   choices that ended by `abort` ──► each one's rest, on its own ──► joined
    stream, n = 1:  chunks pass on; after an `abort` or a broken connection those of the rest follow
    stream, n > 1:  passed through; where it breaks off it ends with an error
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import ClientResponse

from services.first_failure import first_failure
from services.gateway.agent_side import AgentSide
from services.gateway.continuation import Call, asks_for_one, ended, join, usage, what_is_left
from services.gateway.failover import Failover
from services.gateway.proxied_call import ProxiedCall
from services.gateway.servers import Server
from services.gateway.uncaptured_stream import UncapturedStream
from services.gateway.upstream import TryFailedError, error_detail, rest_refused
from services.wire.engine_api import Choice, GenerateAnswer
from services.wire.errors import ContextLengthError
from services.wire.mesh_headers import CALL_HEADER

_answer = msgspec.json.Decoder(GenerateAnswer)


@dataclass
class _Got:
    """A whole answer of one server."""

    server: Server
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Uncaptured:
    """Answers calls of the token route that name no session."""

    def __init__(self, failover: Failover) -> None:
        self._failover = failover

    async def answer(self, call: ProxiedCall, agent: AgentSide) -> None:
        """Raises what `Failover.deliver` raises, and RollmeshError where the rest of an answer is refused."""
        # Most calls are not streamed and not broken off: of those nothing is decoded, neither prompt nor answer.
        asked = _decode(call.body) if b'"stream"' in call.body else {}
        if not asked.get("stream"):
            await self._whole(call, agent)
        elif asks_for_one(asked):
            await self._stream(call, asked, agent)
        else:
            await self._pass_through(call, agent)

    async def _whole(self, call: ProxiedCall, agent: AgentSide) -> None:
        got = await self._ask(call)
        if got.status == 200 and b'"abort"' in got.body:
            asked, whole = _decode(call.body), _answer.decode(got.body)
            with first_failure():
                async with asyncio.TaskGroup() as tasks:
                    rests = [
                        tasks.create_task(self._finished(call, asked, choice, got.server.name))
                        for choice in whole.choices
                    ]
            whole.choices = [rest.result() for rest in rests]
            whole.usage = usage(len(asked["token_ids"]), whole.choices)
            got.body = msgspec.json.encode(whole)
            got.headers = tuple(each for each in got.headers if each[0].lower() != b"content-length")
        await agent.begin(got.status, got.headers)
        await agent.end(got.body)

    async def _finished(self, call: ProxiedCall, asked: Call, drawn: Choice, server_id: str) -> Choice:
        """The sample, carried on until it ends by itself; `server_id`: who broke it off."""
        while drawn.finish_reason == "abort":
            left = what_is_left(asked, drawn)
            if left is None:
                return ended(drawn, "length")
            got = await self._ask(_again(call, left), rest_of=drawn, apart_from=(server_id,))
            if got.status != 200:
                if error_detail(got.body).code == ContextLengthError.code:
                    return ended(drawn, "length")
                raise rest_refused(got.status, got.body)
            drawn = join(drawn, _answer.decode(got.body).choices[0])
            server_id = got.server.name
        return drawn

    async def _ask(self, call: ProxiedCall, rest_of: Choice | None = None, apart_from: Collection[str] = ()) -> _Got:
        got: list[_Got] = []

        async def keep(server: Server, response: ClientResponse) -> None:
            body = await response.read()
            if rest_of is not None and b'"abort"' in body and not _answer.decode(body).choices[0].token_ids:
                raise TryFailedError("it broke the draw off before the first token")
            got.append(_Got(server, response.status, response.raw_headers, body))

        await self._failover.deliver(call, keep, lambda: 0, apart_from=apart_from)
        return got[-1]

    async def _stream(self, call: ProxiedCall, asked: Call, agent: AgentSide) -> None:
        stream = UncapturedStream(asked, agent)
        left: Call | None = stream.first()
        broken_by: tuple[str, ...] = ()
        while left is not None:
            try:
                await self._failover.deliver(
                    _again(call, left), stream.take, stream.progress, apart_from=broken_by, resend=False
                )
                return
            except TryFailedError as failure:
                if agent.ended:
                    return
                broken_by = () if failure.server_id is None else (failure.server_id,)
                left = stream.left()
        await stream.close("length")

    async def _pass_through(self, call: ProxiedCall, agent: AgentSide) -> None:
        async def take(_: Server, response: ClientResponse) -> None:
            await agent.begin(response.status, response.raw_headers)
            async for chunk in response.content.iter_any():
                await agent.pass_on(chunk)
            await agent.end()

        await self._failover.deliver(call, take, lambda: agent.begun + agent.passed_on, resend=False)


def _again(call: ProxiedCall, left: Call) -> ProxiedCall:
    """A call of its own, for what is left: a server that knows the first one must not replay that."""
    call_id = secrets.token_hex(16)
    headers = [(name, call_id if name == CALL_HEADER else value) for name, value in call.headers]
    return replace(call, headers=headers, body=msgspec.json.encode(left), call_id=call_id)


def _decode(body: bytes) -> Call:
    """An empty call for what is no JSON object: the server says what is wrong with it."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
