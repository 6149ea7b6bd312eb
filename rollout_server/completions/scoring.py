"""Text completions that ask for the logprobs of their prompt: a server as the teacher of a distillation.

    prompt ──► GenerationRequest(prompt_logprobs) ──► engine ──► one whole delta ──► answer, as vLLM writes it
                          ▲                             │
                          └─────── asked for again where it was aborted ────────┘

They belong to no session, and nothing of them is captured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec

from rollout_server.chat.renderer import ChatRenderer
from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions import chunks
from rollout_server.completions.base import new_call_id
from rollout_server.completions.prompt_logprobs import check_scored, told_logprobs
from rollout_server.completions.resumable import UntilAccepting, deltas_of
from rollout_server.completions.samples import Sample
from rollout_server.completions.sampling import choose_sampling
from rollout_server.completions.text import prompts_of, text_logprobs
from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest, collect
from services.host.aio import first_failure
from services.wire.errors import NotReadyError, UnsupportedParameterError
from services.wire.openai_api import CompletionCall
from services.wire.rollout_api import SamplingLimits

TRIES = 8
"""A prompt is read in a fraction of the time between two commits: so many interruptions in a row mean something else."""
_LARGE = 2048
"""Prompt tokens above which an answer is written on a thread: each takes three microseconds."""


async def score(engine: Engine, request: GenerationRequest, until_accepting: UntilAccepting) -> GenerationDelta:
    """The whole answer to a request for `prompt_logprobs`, asked for again until it is not aborted.

    Raises NotReadyError where it was interrupted `TRIES` times, and what the engine raises.
    """
    for number in range(TRIES):
        if number:
            await until_accepting()
        tried = replace(request, request_id=f"{request.request_id}~{number}") if number else request
        async with aclosing(deltas_of(engine, tried)) as deltas:
            (answer,) = await collect(deltas)
        if answer.finish_reason != "abort":
            return answer
    raise NotReadyError(
        f"request {request.request_id} was interrupted {TRIES} times before it was answered", "send the call again"
    )


class ScoringCalls:
    """Answers them over one engine. `model`: the name that answers carry."""

    def __init__(
        self, engine: Engine, renderer: Renderer, chat: ChatRenderer, texts: chunks.TokenTexts, model: str
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._chat = chat
        self._texts = texts
        self._model = model

    async def answer(self, call: CompletionCall, until_accepting: UntilAccepting) -> bytes:
        """The JSON of the whole answer to all prompts of `call`.

        Raises UnsupportedParameterError, and as `score` does.
        """
        if refused := call.unsupported():
            raise UnsupportedParameterError(f"{', '.join(refused)}: not supported here", "leave it out")
        check_scored(call.prompt_logprobs, n=call.n or 1, stream=bool(call.stream), session=False)
        limit = 16 if call.max_tokens is None else call.max_tokens  # OpenAI's default for this route
        sampling = choose_sampling(SamplingLimits(), call, limit, (), self._engine.max_model_len)
        head = chunks.AnswerHead(new_call_id("cmpl"), int(time.time()), self._model)
        requests = [
            GenerationRequest(
                request_id=f"{head.call_id}-{number}",
                prompt_token_ids=prompt if isinstance(prompt, list) else await self._renderer.encode(prompt),
                sampling=sampling,
                top_logprobs=call.logprobs or 0,
                prompt_logprobs=True,
            )
            for number, prompt in enumerate(prompts_of(call))
        ]
        with first_failure():
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(score(self._engine, each, until_accepting)) for each in requests]
        answers = [each.result() for each in scoring]
        if sum(len(request.prompt_token_ids) for request in requests) > _LARGE:
            return await asyncio.to_thread(self._written, call, head, requests, answers)
        return self._written(call, head, requests, answers)

    def _written(
        self,
        call: CompletionCall,
        head: chunks.AnswerHead,
        requests: Sequence[GenerationRequest],
        answers: Sequence[GenerationDelta],
    ) -> bytes:
        whole = chunks.TextChunk(head.call_id, head.created, head.model, [])
        sampled = 0
        for request, answer in zip(requests, answers, strict=True):
            stream = self._chat.text_stream(call.stops)
            sample = Sample(answer.index, stream)
            sample.add(answer)
            choice = chunks.TextChunkChoice(
                index=len(whole.choices),
                text=stream.finish()[1],
                finish_reason=sample.finish_reason,
                logprobs=None if call.logprobs is None else text_logprobs(self._texts, call, sample, 0, 0),
                stop_reason=sample.stop_reason(call.stop_token_ids),
                policy_versions=sample.policy_versions,
                prompt_logprobs=told_logprobs(request, answer, self._texts),
            )
            if call.return_token_ids:
                choice.token_ids, choice.prompt_token_ids = sample.token_ids, request.prompt_token_ids
            whole.choices.append(choice)
            sampled += len(sample.token_ids)
        prompts = sum(len(request.prompt_token_ids) for request in requests)
        whole.usage = chunks.UsagePart(prompts, sampled, prompts + sampled)
        return msgspec.json.encode(whole)
