"""An engine that says what it was told to, token for token, and remembers what it sampled.

The samples of requests take the told answers in order; when none is left, they repeat the last. A token's logprob tells
its place and itself: `-(1 + place) / 8 - token / 4096`, exact in float32. A streamed request gets a delta for every
`stride` tokens.
Requests are refused as real engines refuse them. With `hold_after`, samples stand still after so many tokens until it is
taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from transformers import PreTrainedTokenizerFast

from rollout_server.engines.base import FinishReason, GenerationDelta, GenerationRequest
from rollout_server.engines.request_check import check_request
from services.wire.trajectory import VersionSpan
from tests.support.chat_policy import MARKERS, MAX_MODEL_LEN, TURN_END, build_chat_tokenizer
from tests.support.scripted_engine import ScriptedEngine, scores_of

_LIKELY = range(20, 40)
"""Tokens that are told as alternatives: none of them is a marker."""


@dataclass
class Sampled:
    """One sample that was sampled, in whole or in part, whoever heard it."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)

    @property
    def logprobs(self) -> list[float]:
        return [logprob_of(place, token) for place, token in enumerate(self.token_ids)]


@cache
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The chat policy's tokenizer, only to be read."""
    return build_chat_tokenizer()


def logprob_of(place: int, token: int) -> float:
    """Of the token sampled as number `place` (from 0) of its sample."""
    return -(1 + place) / 8 - token / 4096


def spell(text: str, *, ended: bool = True) -> list[int]:
    """`text` in the chat policy's vocabulary as no tokenizer would write it: a token for every byte, markers as they are.

    `ended`: the model closes its turn.
    """
    tokenizer = chat_tokenizer()
    ids: list[int] = []
    while text:
        marker = next((marker for marker in MARKERS if text.startswith(marker)), None)
        said = marker or text[0]
        ids += tokenizer.convert_tokens_to_ids([marker] if marker is not None else _bytes(tokenizer, said))
        text = text[len(said) :]
    return [*ids, *tokenizer.convert_tokens_to_ids([TURN_END])] if ended else ids


def _bytes(tokenizer: PreTrainedTokenizerFast, character: str) -> list[str]:
    """The byte tokens of one character. No merge of this vocabulary begins with a lone one."""
    return [piece for token in tokenizer.tokenize(character) for piece in token]


class TellingEngine(ScriptedEngine):
    """Serves the vocabulary of `tests.support.chat_policy`."""

    def __init__(
        self, answers: Iterable[Sequence[int]] = (), *, max_model_len: int = MAX_MODEL_LEN, step_s: float = 0.0
    ) -> None:
        super().__init__(max_model_len=max_model_len, step_s=step_s)
        tokenizer = chat_tokenizer()
        self._vocabulary = len(tokenizer)
        self._ends: tuple[int, ...] = (tokenizer.convert_tokens_to_ids(TURN_END),)
        self._answers = [list(answer) for answer in answers] or [spell("Well.")]
        self._told = 0
        self.sampled: list[Sampled] = []
        """Every sample, in the order of their beginning."""
        self.hold_after: int | None = None
        self.stride = 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._ends

    def tell(self, *answers: Sequence[int]) -> None:
        """Say these from now on."""
        self._answers, self._told = [list(answer) for answer in answers], 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        check_request(request, max_model_len=self.max_model_len, vocabulary=self._vocabulary, eos_token_ids=self._ends)
        self.requests.append(request)
        self._active[request.request_id] = True
        self._idle.clear()
        told = [self._next() for _ in range(request.n)]
        sampled = [Sampled(list(request.prompt_token_ids)) for _ in told]
        self.sampled += sampled
        whole = False
        try:
            for index, (answer, sample) in enumerate(zip(told, sampled, strict=True)):
                ends = () if request.sampling.ignore_eos else self._ends
                planned, reason = _cut(answer, (*ends, *request.sampling.stop_token_ids), request.sampling.max_tokens)
                sent = 0
                for token in planned:
                    await self._may_sample(request, len(sample.token_ids))
                    if not self._active[request.request_id]:
                        reason = "abort"
                        break
                    sample.token_ids.append(token)
                    self._tokens += 1
                    now = len(sample.token_ids)
                    if request.stream and now - sent == self.stride and now < len(planned):
                        yield self._delta(request, index, sample, sent, None)
                        sent = now
                yield self._delta(request, index, sample, sent, reason)
            whole = True
        finally:
            self.aborted_early += not whole
            del self._active[request.request_id]
            if not self._active:
                self._idle.set()

    def _next(self) -> list[int]:
        answer = self._answers[min(self._told, len(self._answers) - 1)]
        self._told += 1
        return answer

    async def _may_sample(self, request: GenerationRequest, place: int) -> None:
        """Return when the next token may be sampled, or the request was aborted."""
        await asyncio.sleep(self._step_s)
        while self._active[request.request_id]:
            if self.crash is not None:
                raise self.crash
            if self._running.is_set() and (self.hold_after is None or place < self.hold_after):
                return
            await asyncio.sleep(0.002)

    def _delta(
        self, request: GenerationRequest, index: int, sample: Sampled, sent: int, reason: FinishReason | None
    ) -> GenerationDelta:
        token_ids, logprobs = sample.token_ids[sent:], sample.logprobs[sent:]
        top = [
            [(token, value), *((other, value - 1) for other in _LIKELY if other != token)][: request.top_logprobs]
            for token, value in zip(token_ids, logprobs, strict=True)
        ]
        return GenerationDelta(
            request_id=request.request_id,
            index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=[VersionSpan(0, len(token_ids), self._version)] if token_ids else [],
            finish_reason=reason,
            top_logprobs=top if request.top_logprobs else None,
            prompt_logprobs=scores_of(request) if token_ids and not sent else None,
        )


def _cut(answer: Sequence[int], ends: Sequence[int], limit: int) -> tuple[list[int], FinishReason]:
    """What of an answer is sampled, and why it ends there."""
    for place, token in enumerate(answer[:limit]):
        if token in ends:
            return list(answer[: place + 1]), "stop"
    return list(answer[:limit]), "length"
