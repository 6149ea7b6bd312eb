"""Stateless `POST /inference/v1/generate`: a generation that breaks off is resumed on another server from its tokens.

No server keeps such a generation, so a plain retry would generate something else. Instead the tokens that have come are
appended to the prompt and the rest is asked for (`services.policies.continuation`); the agent sees one answer, never
`finish_reason: "abort"`.

    whole answer:   choices that ended by `abort` ──► each one's rest, on its own ──► joined
    stream, n = 1:  chunks pass on; after an `abort` or a broken connection those of the rest follow
    stream, n > 1:  passed through; where it breaks off it ends with an error
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp
import msgspec
from aiohttp import ClientResponse

from services.gateway.request import ProxiedCall, read_body
from services.gateway.response import DownstreamResponse
from services.gateway.retry import Failover
from services.gateway.servers import Server
from services.gateway.upstream import TryFailedError, error_detail, rest_refused
from services.host.aio import first_failure
from services.http.app import DONE
from services.policies.continuation import Versions, joined_versions, rest_of
from services.wire import vllm_api
from services.wire.errors import UNDECODABLE, ContextLengthError
from services.wire.gateway_api import CALL_HEADER

_answer = msgspec.json.Decoder(vllm_api.GenerateAnswer)


@dataclass
class _Whole:
    """A whole answer of one server."""

    server: Server
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class StatelessCalls:
    """Answers calls of the token route that name no session."""

    def __init__(self, failover: Failover) -> None:
        self._failover = failover

    async def answer(self, call: ProxiedCall, agent: DownstreamResponse) -> None:
        """Raises what `Failover.deliver` raises, and RollmeshError where the rest of an answer is refused."""
        # Most calls are not streamed and not broken off: of those nothing is decoded, neither prompt nor answer.
        asked = _decode(call.body) if b'"stream"' in call.body else {}
        if not asked.get("stream"):
            await self._whole(call, agent)
        elif asks_for_one(asked):
            await self._stream(call, asked, agent)
        else:
            await self._pass_through(call, agent)

    async def _whole(self, call: ProxiedCall, agent: DownstreamResponse) -> None:
        got = await self._ask(call)
        if got.status == 200 and b'"abort"' in got.body:
            asked, whole = _decode(call.body), _answer.decode(got.body)
            with first_failure():
                async with asyncio.TaskGroup() as tasks:
                    rests = [
                        tasks.create_task(self._resumed(call, asked, choice, got.server.name))
                        for choice in whole.choices
                    ]
            whole.choices = [rest.result() for rest in rests]
            whole.usage = usage(len(asked["token_ids"]), whole.choices)
            got.body = msgspec.json.encode(whole)
            got.headers = tuple(each for each in got.headers if each[0].lower() != b"content-length")
        await agent.begin(got.status, got.headers)
        await agent.end(got.body)

    async def _resumed(
        self, call: ProxiedCall, asked: Call, sampled: vllm_api.Choice, server_id: str
    ) -> vllm_api.Choice:
        """The sample, resumed until it ends by itself; `server_id`: who broke it off."""
        while sampled.finish_reason == "abort":
            left = rest_call(asked, sampled)
            if left is None:
                return ended(sampled, "length")
            got = await self._ask(_with_body(call, left), sampled, apart_from=(server_id,))
            if got.status != 200:
                if error_detail(got.body).code == ContextLengthError.code:
                    return ended(sampled, "length")
                raise rest_refused(got.status, got.body)
            sampled = join(sampled, _answer.decode(got.body).choices[0])
            server_id = got.server.name
        return sampled

    async def _ask(
        self, call: ProxiedCall, sampled: vllm_api.Choice | None = None, apart_from: Collection[str] = ()
    ) -> _Whole:
        got: list[_Whole] = []

        async def keep(server: Server, response: ClientResponse) -> None:
            body = await response.read()
            if sampled is not None and b'"abort"' in body and not _answer.decode(body).choices[0].token_ids:
                raise TryFailedError("it broke the generation off before the first token")
            got.append(_Whole(server, response.status, response.raw_headers, body))

        await self._failover.deliver(call, keep, lambda: 0, apart_from=apart_from)
        return got[-1]

    async def _stream(self, call: ProxiedCall, asked: Call, agent: DownstreamResponse) -> None:
        stream = StatelessStream(asked, agent)
        left: Call | None = stream.first()
        broken_by: tuple[str, ...] = ()
        while left is not None:
            try:
                await self._failover.deliver(
                    _with_body(call, left), stream.take, stream.progress, apart_from=broken_by, resend=False
                )
                return
            except TryFailedError as failure:
                if agent.ended:
                    return
                broken_by = () if failure.server_id is None else (failure.server_id,)
                left = stream.left()
        await stream.close("length")

    async def _pass_through(self, call: ProxiedCall, agent: DownstreamResponse) -> None:
        async def take(_: Server, response: ClientResponse) -> None:
            await agent.begin(response.status, response.raw_headers)
            async for chunk in response.content.iter_any():
                await agent.pass_on(chunk)
            await agent.end()

        await self._failover.deliver(call, take, lambda: agent.begun + agent.passed_on, resend=False)


def _with_body(call: ProxiedCall, left: Call) -> ProxiedCall:
    """The call with another body and call id: a server that knows the first call must not replay its answer."""
    call_id = secrets.token_hex(16)
    headers = [(name, call_id if name == CALL_HEADER else value) for name, value in call.headers]
    return replace(call, headers=headers, body=msgspec.json.encode(left), call_id=call_id)


def _decode(body: bytes) -> Call:
    """An empty call for what is no JSON object: the server says what is wrong with it."""
    decoded: Any = read_body(msgspec.json.decode, body)
    return decoded if isinstance(decoded, dict) else {}


_chunk = msgspec.json.Decoder(vllm_api.GenerateChunk)
_encoder = msgspec.json.Encoder()
_END = b"data: [DONE]"
_DATA = b"data: "


class StatelessStream:
    """One streamed sample that several servers may generate in turn; `take` handles one server's part of it.

    The first server's events pass as they are. Those of a later one are rewritten to continue the first stream: its
    `request_id`, versions over the whole sample, usage of the whole answer.
    """

    def __init__(self, asked: Call, agent: DownstreamResponse) -> None:
        options = asked.get("stream_options") or {}
        # So that it is known of every token which version sampled it, wherever the stream breaks off.
        self._asked = asked | {"stream_options": {**options, "version_spans": True}}
        self._prompt_tokens = len(asked["token_ids"])
        self._wants_usage = bool(options.get("include_usage"))
        self._agent = agent
        self._request_id = ""
        self._sampled = vllm_api.ChunkChoice(index=0, token_ids=[], policy_versions=[])
        self._earlier = 0
        """Tokens that other servers sampled before the one that generates now."""

    def first(self) -> Call:
        """What is asked of the first server."""
        return self._asked

    def left(self) -> Call | None:
        """What is asked of the next; None where all tokens have come."""
        return rest_call(self._asked, self._sampled)

    def progress(self) -> int:
        return len(self._sampled.token_ids)

    async def take(self, _: Server, response: ClientResponse) -> None:
        """Pass a server's events on. Raises TryFailedError where the rest is to come from another one."""
        self._earlier = len(self._sampled.token_ids)
        if response.status != 200:
            await self._take_refusal(response)
            return
        rest = b""
        async for data in response.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            passed: list[bytes] = []
            aborted = False
            for event in events:
                if event == _END:
                    await self._agent.begin(response.status, response.raw_headers)
                    await self._agent.end(b"".join(passed) + DONE)
                    # To the end of the answer, or its connection could not be used again.
                    with suppress(aiohttp.ClientError, OSError):
                        await response.content.read()
                    return
                written, aborted = self._read(event)
                passed.append(written)
                if aborted:
                    break
            if any(passed):
                await self._agent.begin(response.status, response.raw_headers)
                await self._agent.pass_on(b"".join(passed))
            if aborted:
                raise TryFailedError("it broke the generation off")
        raise TryFailedError("the stream ended before its end")

    async def close(self, reason: Literal["stop", "length"]) -> None:
        """End the stream, since all tokens have come."""
        versions = self._sampled.policy_versions
        last = vllm_api.ChunkChoice(index=0, token_ids=[], finish_reason=reason, policy_versions=versions)
        if self._asked["sampling_params"].get("logprobs") is not None:
            last.logprobs = vllm_api.Logprobs([])
        last.weight_versions = vllm_api.weight_spans(versions, len(self._sampled.token_ids))
        chunks = [vllm_api.GenerateChunk(request_id=self._request_id, choices=[last])]
        if self._wants_usage:
            spent = usage(self._prompt_tokens, [self._sampled])
            chunks.append(vllm_api.GenerateChunk(request_id=self._request_id, choices=[], usage=spent))
        await self._agent.end(b"".join(_event(chunk) for chunk in chunks) + DONE)

    async def _take_refusal(self, response: ClientResponse) -> None:
        body = await response.read()
        if not self._agent.begun:
            await self._agent.begin(response.status, response.raw_headers)
            await self._agent.end(body)
        elif error_detail(body).code == ContextLengthError.code:
            await self.close("length")
        else:
            raise rest_refused(response.status, body)

    def _read(self, event: bytes) -> tuple[bytes, bool]:
        """The event as the agent gets it, nothing for one that says nothing, and whether the server broke off with it."""
        try:
            chunk = _chunk.decode(event.removeprefix(_DATA))
        except UNDECODABLE as error:
            raise TryFailedError(f"it failed in mid-stream ({event[:500].decode(errors='replace')})") from error
        self._request_id = self._request_id or chunk.request_id
        aborted = False
        for piece in chunk.choices:
            self._extend(piece)
            aborted = piece.finish_reason == "abort"
        if not aborted and not self._earlier:
            return event + b"\n\n", False
        for piece in chunk.choices:
            if aborted:
                piece.finish_reason = piece.policy_versions = piece.weight_versions = None
            elif piece.finish_reason is not None:
                piece.policy_versions = self._sampled.policy_versions
                piece.weight_versions = vllm_api.weight_spans(piece.policy_versions, len(self._sampled.token_ids))
        chunk.request_id = self._request_id
        if chunk.usage is not None:
            chunk.usage = usage(self._prompt_tokens, [self._sampled])
        says_nothing = aborted and not any(piece.token_ids for piece in chunk.choices)
        return b"" if says_nothing else _event(chunk), aborted

    def _extend(self, piece: vllm_api.ChunkChoice) -> None:
        sampled, count = self._sampled, len(self._sampled.token_ids)
        sampled.token_ids += piece.token_ids
        if piece.token_ids:
            spans = piece.version_spans
            starts = None if spans is msgspec.UNSET else [(span.version, span.start) for span in spans]
            sampled.policy_versions = known_versions(sampled.policy_versions, count, starts)


def _event(chunk: vllm_api.GenerateChunk) -> bytes:
    return _DATA + _encoder.encode(chunk) + b"\n\n"


Call = dict[str, Any]
"""A decoded `GenerateCall`, with all that its sender wrote."""


def asks_for_one(call: Call) -> bool:
    """Whether it wants a single sample. One that is not even well formed does not: the server refuses it."""
    sampling = call.get("sampling_params")
    return isinstance(sampling, dict) and sampling.get("n", 1) == 1 and isinstance(call.get("token_ids"), list)


def rest_call(call: Call, sampled: vllm_api.Choice) -> Call | None:
    """The call for the rest of one sample; None where `sampled` has all the tokens that were asked for."""
    sampling = {**call["sampling_params"], "n": 1}
    rest = rest_of(
        call["token_ids"],
        sampled.token_ids,
        max_tokens=sampling.get("max_tokens"),
        resumed=call.get("resumed", 0),
        first_index=call.get("first_index", 0),
        index=sampled.index,
    )
    if rest is None:
        return None
    if rest.max_tokens is not None:
        sampling["max_tokens"] = rest.max_tokens
    left = {
        **call,
        "token_ids": rest.token_ids,
        "sampling_params": sampling,
        "resumed": rest.resumed,
        "first_index": rest.first_index,
        # The agent has its prompt already.
        "return_token_ids": False,
    }
    # The engine may still know a request of this name.
    left.pop("request_id", None)
    return left


def join(sampled: vllm_api.Choice, more: vllm_api.Choice) -> vllm_api.Choice:
    """One sample of two parts that follow each other; `more` says how it ends."""
    versions = known_versions(sampled.policy_versions, len(sampled.token_ids), more.policy_versions)
    token_ids = [*sampled.token_ids, *more.token_ids]
    return vllm_api.Choice(
        index=sampled.index,
        token_ids=token_ids,
        logprobs=_joined_logprobs(sampled, more),
        finish_reason=more.finish_reason,
        stop_reason=more.stop_reason,
        weight_versions=vllm_api.weight_spans(versions, len(token_ids)),
        policy_versions=versions,
    )


def ended(sampled: vllm_api.Choice, reason: Literal["stop", "length"]) -> vllm_api.Choice:
    """The sample as it is, whole."""
    return join(sampled, vllm_api.Choice(index=sampled.index, token_ids=[], finish_reason=reason, policy_versions=[]))


def known_versions(earlier: Versions | None, count: int, more: Versions | None) -> list[tuple[int, int]] | None:
    """As `joined_versions`; None where a part that has tokens does not tell its versions."""
    if not count:
        earlier = []
    return None if earlier is None or more is None else joined_versions(earlier, count, more)


def usage(prompt_tokens: int, samples: Sequence[vllm_api.Choice]) -> vllm_api.Usage:
    """Of the whole answer, as if it had been sampled in one go."""
    sampled = sum(len(sample.token_ids) for sample in samples)
    return vllm_api.Usage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens + sampled, completion_tokens=sampled)


def _joined_logprobs(sampled: vllm_api.Choice, more: vllm_api.Choice) -> vllm_api.Logprobs | None:
    if sampled.logprobs is None and more.logprobs is None:
        return None
    parts = [part.logprobs.content for part in (sampled, more) if part.logprobs is not None]
    return vllm_api.Logprobs([entry for part in parts for entry in part])
