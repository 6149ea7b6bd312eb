"""One streamed sample outside any session, from as many servers as it takes.

The first server's events pass as they are. Those of a later one are written anew: as if they went on where the first
broke off, with its `request_id`, versions over the whole sample, and usage of the whole answer.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import aiohttp
import msgspec
from aiohttp import ClientResponse

from services.event_stream import DONE
from services.gateway.agent_side import AgentSide
from services.gateway.continuation import Call, joined_versions, usage, weight_spans, what_is_left
from services.gateway.servers import Server
from services.gateway.upstream import TryFailedError, error_detail, rest_refused
from services.wire.engine_api import ChunkChoice, GenerateChunk, Logprobs
from services.wire.errors import ContextLengthError

_chunk = msgspec.json.Decoder(GenerateChunk)
_encoder = msgspec.json.Encoder()
_END = b"data: [DONE]"
_DATA = b"data: "


class UncapturedStream:
    """What the agent has of one sample; `take` handles one server's part of it."""

    def __init__(self, asked: Call, agent: AgentSide) -> None:
        options = asked.get("stream_options") or {}
        # So that it is known of every token which version drew it, wherever the stream breaks off.
        self._asked = asked | {"stream_options": {**options, "version_spans": True}}
        self._prompt_tokens = len(asked["token_ids"])
        self._wants_usage = bool(options.get("include_usage"))
        self._agent = agent
        self._request_id = ""
        self._drawn = ChunkChoice(index=0, token_ids=[], policy_versions=[])
        self._earlier = 0
        """Tokens that other servers drew before the one that draws now."""

    def first(self) -> Call:
        """What is asked of the first server."""
        return self._asked

    def left(self) -> Call | None:
        """What is asked of the next; None where all tokens have come."""
        return what_is_left(self._asked, self._drawn)

    def progress(self) -> int:
        return len(self._drawn.token_ids)

    async def take(self, _: Server, response: ClientResponse) -> None:
        """Pass a server's events on. Raises TryFailedError where the rest is to come from another one."""
        self._earlier = len(self._drawn.token_ids)
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
                raise TryFailedError("it broke the draw off")
        raise TryFailedError("the stream ended before its end")

    async def close(self, reason: Literal["stop", "length"]) -> None:
        """End the stream, since all tokens have come."""
        versions = self._drawn.policy_versions
        last = ChunkChoice(index=0, token_ids=[], finish_reason=reason, policy_versions=versions)
        if self._asked["sampling_params"].get("logprobs") is not None:
            last.logprobs = Logprobs([])
        last.weight_versions = weight_spans(versions, len(self._drawn.token_ids))
        chunks = [GenerateChunk(request_id=self._request_id, choices=[last])]
        if self._wants_usage:
            spent = usage(self._prompt_tokens, [self._drawn])
            chunks.append(GenerateChunk(request_id=self._request_id, choices=[], usage=spent))
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
        except msgspec.MsgspecError as error:
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
                piece.policy_versions = self._drawn.policy_versions
                piece.weight_versions = weight_spans(piece.policy_versions, len(self._drawn.token_ids))
        chunk.request_id = self._request_id
        if chunk.usage is not None:
            chunk.usage = usage(self._prompt_tokens, [self._drawn])
        says_nothing = aborted and not any(piece.token_ids for piece in chunk.choices)
        return b"" if says_nothing else _event(chunk), aborted

    def _extend(self, piece: ChunkChoice) -> None:
        drawn, count = self._drawn, len(self._drawn.token_ids)
        drawn.token_ids += piece.token_ids
        if piece.token_ids:
            spans = piece.version_spans
            starts = None if spans is msgspec.UNSET else [(span.version, span.start) for span in spans]
            drawn.policy_versions = joined_versions(drawn.policy_versions, count, starts)


def _event(chunk: GenerateChunk) -> bytes:
    return _DATA + _encoder.encode(chunk) + b"\n\n"
