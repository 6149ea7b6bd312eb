"""A text completion as its client gets it: in one piece, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rollout_server.answers import Answer
from rollout_server.dialect.caller import Context
from rollout_server.dialect.chunks import AnswerHead, TextChunk, TextChunkChoice, TextLogprobsPart, UsagePart, event
from rollout_server.dialect.drawing import Sample
from rollout_server.dialect.token_texts import TokenTexts
from services.event_stream import DONE
from services.wire.openai_api import Completion, CompletionCall, CompletionChoice, CompletionLogprobs, Usage

_TOKEN_FIELDS: Any = {"choices": {"__all__": {"token_ids", "policy_versions", "prompt_token_ids"}}}


def whole_text(
    texts: TokenTexts,
    head: AnswerHead,
    call: CompletionCall,
    drawn: Sequence[Sequence[Sample[str]]],
    said: Sequence[Sequence[str]],
    contexts: Sequence[Context],
    prompt_tokens: int,
) -> bytes:
    """The answer in one piece. Token fields are there only where they were asked for."""
    choices: list[CompletionChoice] = []
    for samples, answers, context in zip(drawn, said, contexts, strict=True):
        for sample, text in zip(samples, answers, strict=True):
            choice = CompletionChoice(
                index=len(choices),
                text=text,
                finish_reason=sample.finish_reason or "stop",
                stop_reason=sample.stop_reason(call.stop_token_ids),
            )
            if call.logprobs is not None:
                entries = _text_logprobs(texts, call, sample, 0, 0)
                choice.logprobs = CompletionLogprobs.model_validate(entries, from_attributes=True)
            if call.return_token_ids:
                choice.token_ids, choice.policy_versions = sample.token_ids, sample.policy_versions
                choice.prompt_token_ids = context.token_ids
            choices.append(choice)
    count = _count(drawn)
    completion = Completion(
        id=head.call_id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=count, total_tokens=prompt_tokens + count),
    )
    unasked = None if call.return_token_ids else _TOKEN_FIELDS
    return completion.model_dump_json(exclude=unasked).encode()


class TextChunks:
    """The events of one streamed text completion."""

    def __init__(self, call: CompletionCall, head: AnswerHead, texts: TokenTexts, answer: Answer) -> None:
        self._call = call
        self._head = head
        self._texts = texts
        self._answer = answer
        self._said: dict[int, int] = {}

    def pieces_of(self, first: int) -> Callable[[Sample[str], str, int], None]:
        """Told of the growth of samples of one prompt, whose choices are numbered from `first`."""

        def piece(sample: Sample[str], text: str, grown: int) -> None:
            if text or self._call.logprobs is not None or self._call.return_token_ids:
                self._answer.put(self._chunk(first + sample.index, sample, text, grown))

        return piece

    def close(
        self,
        drawn: Sequence[Sequence[Sample[str]]],
        finished: Sequence[Sequence[tuple[str, str]]],
        contexts: Sequence[Context],
        prompt_tokens: int,
    ) -> None:
        """Stage the last chunks: what was held back, why each sample ended, and the usage if it was asked for."""
        number = 0
        for samples, texts, context in zip(drawn, finished, contexts, strict=True):
            for sample, (rest, _) in zip(samples, texts, strict=True):
                self._answer.stage(self._chunk(number, sample, rest, 0, context))
                number += 1
        if self._call.stream_options is not None and self._call.stream_options.include_usage:
            count = _count(drawn)
            usage = self._new([])
            usage.usage = UsagePart(prompt_tokens, count, prompt_tokens + count)
            self._answer.stage(event(usage))
        self._answer.stage(DONE)

    def _new(self, choices: list[TextChunkChoice]) -> TextChunk:
        return TextChunk(self._head.call_id, self._head.created, self._head.model, choices)

    def _chunk(self, number: int, sample: Sample[str], text: str, grown: int, ended: Context | None = None) -> bytes:
        call = self._call
        choice = TextChunkChoice(number, text)
        offset = self._said.get(number, 0)
        self._said[number] = offset + len(text)
        start = len(sample.token_ids) - grown
        if call.logprobs is not None and grown:
            choice.logprobs = _text_logprobs(self._texts, call, sample, start, offset)
        if call.return_token_ids:
            choice.token_ids = sample.token_ids[start:]
        if ended is not None:
            choice.finish_reason = sample.finish_reason or "stop"
            choice.stop_reason = sample.stop_reason(call.stop_token_ids)
            if call.return_token_ids:
                choice.policy_versions, choice.prompt_token_ids = sample.policy_versions, ended.token_ids
        return event(self._new([choice]))


def _text_logprobs(
    texts: TokenTexts, call: CompletionCall, sample: Sample[str], start: int, offset: int
) -> TextLogprobsPart:
    """Of the tokens from `start` on; `offset`: characters of text before them."""
    as_ids = bool(call.return_tokens_as_token_ids)
    tokens = [texts.text(token, as_ids=as_ids) for token in sample.token_ids[start:]]
    lengths = [len(texts.text(token)) for token in sample.token_ids[start:]]
    top = [
        {texts.text(other, as_ids=as_ids): value for other, value in each} for each in sample.top_logprobs[start:]
    ] or None
    return TextLogprobsPart(
        tokens=tokens,
        token_logprobs=sample.logprobs[start:],
        top_logprobs=top,
        text_offset=[offset + before for before in accumulate([0, *lengths[:-1]])] if lengths else [],
    )


def _count(drawn: Sequence[Sequence[Sample[str]]]) -> int:
    return sum(len(sample.token_ids) for samples in drawn for sample in samples)
