"""Server-sent events of the OpenAI API, as msgspec structs: a stream encodes one for every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rollout_server.chat.detokenizer import TokenTable
from rollout_server.completions.samples import TopLogprobs
from services.wire.vllm_api import PromptLogprobs

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class AnswerHead:
    """What every try of an answer says alike. `created`: Unix seconds."""

    call_id: str
    created: int
    model: str


class FunctionPart(msgspec.Struct):
    name: str
    arguments: str


class ToolCallPart(msgspec.Struct):
    index: int
    id: str
    function: FunctionPart
    type: str = "function"


class DeltaPart(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class TopPart(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobPart(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopPart]


class LogprobsPart(msgspec.Struct):
    content: list[LogprobPart]


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: DeltaPart
    finish_reason: str | None = None
    logprobs: LogprobsPart | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    policy_versions: list[tuple[int, int]] | msgspec.UnsetType = msgspec.UNSET


class UsagePart(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: UsagePart | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextLogprobsPart(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChunkChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobsPart | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    policy_versions: list[tuple[int, int]] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType | None = msgspec.UNSET


class TextChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[TextChunkChoice]
    object: str = "text_completion"
    usage: UsagePart | msgspec.UnsetType | None = msgspec.UNSET


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(chunk) + b"\n\n"


class TokenTexts:
    """Text and bytes of single tokens, for logprob entries. `as_ids`: as `token_id:N`, for clients that need exact ids."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def text(self, token_id: int, *, as_ids: bool = False) -> str:
        """A token's text; U+FFFD stands for a part of a character."""
        return f"token_id:{token_id}" if as_ids else self._bytes(token_id).decode("utf-8", "replace")

    def entries(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[TopLogprobs],
        *,
        as_ids: bool,
    ) -> list[LogprobPart]:
        """One entry a token. `top`: alternatives of each token; empty where none were asked for."""
        return [
            LogprobPart(
                token=self.text(token_id, as_ids=as_ids),
                logprob=logprob,
                bytes=list(self._bytes(token_id)),
                top_logprobs=[
                    TopPart(self.text(other, as_ids=as_ids), value, list(self._bytes(other)))
                    for other, value in (top[position] if top else ())
                ],
            )
            for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
        ]

    def _bytes(self, token_id: int) -> bytes:
        if self._table.bytewise:
            return self._table.bytes_of(token_id)
        return self._table.decode([token_id], skip_special=False).encode()
