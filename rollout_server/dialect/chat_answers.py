"""A chat completion as its client gets it: in one piece, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_server.answers import Answer
from rollout_server.chat.answer_stream import AnswerDelta
from rollout_server.chat.answers import ParsedAnswer
from rollout_server.dialect.chunks import (
    AnswerHead,
    ChatChunk,
    ChatChunkChoice,
    DeltaPart,
    FunctionPart,
    LogprobsPart,
    ToolCallPart,
    UsagePart,
    event,
)
from rollout_server.dialect.drawing import Sample
from rollout_server.dialect.token_texts import TokenTexts
from services.event_stream import DONE
from services.wire.openai_api import AnswerMessage, ChatCall, ChatChoice, ChatCompletion, ChatLogprobs, Usage

_UNSET = msgspec.UNSET
_TOKEN_FIELDS: Any = {"prompt_token_ids": True, "choices": {"__all__": {"token_ids", "policy_versions"}}}


def whole_chat(
    texts: TokenTexts,
    head: AnswerHead,
    call: ChatCall,
    samples: Sequence[Sample[AnswerDelta]],
    answers: Sequence[ParsedAnswer],
    prompt: list[int],
) -> bytes:
    """The answer in one piece. Token fields are there only where they were asked for; others may be null, as OpenAI's."""
    choices = []
    for sample, parsed in zip(samples, answers, strict=True):
        choice = ChatChoice(
            index=sample.index,
            message=assistant_message(parsed),
            finish_reason=finish_reason(sample, parsed),
            stop_reason=sample.stop_reason(call.stop_token_ids),
        )
        if call.logprobs:
            entries = texts.entries(
                sample.token_ids,
                sample.logprobs,
                sample.top_logprobs,
                as_ids=bool(call.return_tokens_as_token_ids),
            )
            choice.logprobs = ChatLogprobs.model_validate(LogprobsPart(entries), from_attributes=True)
        if call.return_token_ids:
            choice.token_ids, choice.policy_versions = sample.token_ids, sample.policy_versions
        choices.append(choice)
    drawn = sum(len(sample.token_ids) for sample in samples)
    completion = ChatCompletion(
        id=head.call_id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=drawn, total_tokens=len(prompt) + drawn),
        prompt_token_ids=prompt if call.return_token_ids else None,
    )
    unasked = None if call.return_token_ids else _TOKEN_FIELDS
    return completion.model_dump_json(exclude=unasked).encode()


class ChatChunks:
    """The events of one streamed chat completion."""

    def __init__(self, call: ChatCall, head: AnswerHead, texts: TokenTexts, answer: Answer) -> None:
        self._call = call
        self._head = head
        self._texts = texts
        self._answer = answer
        self._begun: set[int] = set()

    def piece(self, sample: Sample[AnswerDelta], said: AnswerDelta, grown: int) -> None:
        """A sample has grown. Without logprobs and token ids to tell of, what says nothing is not sent."""
        if not said and not self._call.logprobs and not self._call.return_token_ids:
            return
        self._answer.put(self._chunk(sample, said, grown))

    def close(
        self,
        samples: Sequence[Sample[AnswerDelta]],
        finished: Sequence[tuple[AnswerDelta, ParsedAnswer]],
        prompt: list[int],
    ) -> None:
        """Stage the last chunks: what was held back, why each sample ended, and the usage if it was asked for."""
        for sample, (rest, parsed) in zip(samples, finished, strict=True):
            self._answer.stage(self._chunk(sample, rest, 0, finish_reason(sample, parsed), prompt))
        options = self._call.stream_options
        if options is not None and options.include_usage:
            drawn = sum(len(sample.token_ids) for sample in samples)
            usage = self._new([])
            usage.usage = UsagePart(len(prompt), drawn, len(prompt) + drawn)
            self._answer.stage(event(usage))
        self._answer.stage(DONE)

    def _new(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(self._head.call_id, self._head.created, self._head.model, choices)

    def _chunk(
        self,
        sample: Sample[AnswerDelta],
        said: AnswerDelta,
        grown: int,
        finish_reason: str | None = None,
        prompt: list[int] | None = None,
    ) -> bytes:
        call, first = self._call, sample.index not in self._begun
        self._begun.add(sample.index)
        calls = [ToolCallPart(one.index, one.id, FunctionPart(one.name, one.arguments)) for one in said.tool_calls]
        delta = DeltaPart(
            role="assistant" if first else None,
            content=said.content or ("" if first and not said.reasoning_content and not calls else None),
            reasoning_content=said.reasoning_content or None,
            tool_calls=calls or None,
        )
        choice = ChatChunkChoice(sample.index, delta, finish_reason)
        new = slice(len(sample.token_ids) - grown, None) if grown else slice(0, 0)
        if call.logprobs and grown:
            entries = self._texts.entries(
                sample.token_ids[new],
                sample.logprobs[new],
                sample.top_logprobs[new],
                as_ids=bool(call.return_tokens_as_token_ids),
            )
            choice.logprobs = LogprobsPart(entries)
        if finish_reason is not None:
            choice.stop_reason = sample.stop_reason(call.stop_token_ids)
        chunk = self._new([choice])
        if call.return_token_ids:
            choice.token_ids = sample.token_ids[new]
            if finish_reason is not None:
                choice.policy_versions = sample.policy_versions
                chunk.prompt_token_ids = prompt if prompt is not None else _UNSET
        return event(chunk)


def finish_reason(sample: Sample[AnswerDelta], parsed: ParsedAnswer) -> str:
    """OpenAI's word for why an answer ended."""
    reason = sample.finish_reason or "stop"
    return "tool_calls" if reason == "stop" and parsed.tool_calls else reason


def assistant_message(parsed: ParsedAnswer) -> AnswerMessage:
    """The message that a client gets and sends back."""
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments_json}} for call in parsed.tool_calls
    ]
    return AnswerMessage.model_validate(
        {"content": parsed.content, "reasoning_content": parsed.reasoning_content, "tool_calls": calls or None}
    )
