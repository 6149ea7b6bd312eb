"""Text completions: prompts as text or as tokens, each extending captured tokens where it can.

    text    the whole text of a captured call, and more ──► its tokens, and only the rest encoded
            anything else ──► encoded whole
    tokens  the path of a captured call, and more ──► a child of it
            anything else ──► a root, with the reason why

So an agent that keeps its transcript as text continues the very tokens that were sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from rollout_server.chat.renderer import ChatRenderer
from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions import chunks
from rollout_server.completions.base import AnswerContext, Context, fit, why_no_prefix, written
from rollout_server.completions.prompt_logprobs import check_scored
from rollout_server.completions.samples import Sample, collect_samples
from rollout_server.completions.sampling import choose_sampling
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.journal.records import NodeRecord
from rollout_server.sessions.capture import digest_of, path
from rollout_server.sessions.session import Session
from services.http.app import DONE
from services.wire.errors import UnsupportedParameterError, UsageError
from services.wire.openai_api import Completion, CompletionCall, CompletionChoice, CompletionLogprobs, Usage
from services.wire.trajectory import BreakReason

MOST_ANSWERS = 256
_NOT_HERE = {"prompt_logprobs"}
_TOKEN_FIELDS = {"token_ids", "policy_versions", "prompt_token_ids"}


class CompletionCalls:
    """Makes text completions over one engine. `model`: the name that answers carry."""

    def __init__(
        self, engine: Engine, renderer: Renderer, chat: ChatRenderer, texts: chunks.TokenTexts, model: str
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._chat = chat
        self._texts = texts
        self._model = model

    async def produce(self, call: CompletionCall, answer_context: AnswerContext) -> None:
        """Generate and capture the answers to all prompts of `call`.

        Raises UnsupportedParameterError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        if refused := call.unsupported():
            raise UnsupportedParameterError(f"{', '.join(refused)}: not supported here", "leave it out")
        session, call_id, answer = answer_context.session, answer_context.call_id, answer_context.answer
        check_scored(call.prompt_logprobs, n=call.n or 1, stream=bool(call.stream), session=True)
        prompts = prompts_of(call)
        contexts = [await self._find_context(session, prompt) for prompt in prompts]
        n, longest = call.n or 1, self._engine.max_model_len
        limit = 16 if call.max_tokens is None else call.max_tokens  # OpenAI's default for this route
        sampling = choose_sampling(session.terms.sampling, call, limit, (), longest)
        fitted = fit(session, sampling, contexts, n, longest)
        head = chunks.AnswerHead(call_id, answer_context.created, self._model)
        stream = TextChunks(call, head, self._texts, answer_context, contexts) if call.stream else None

        async def sample_one(number: int) -> list[Sample[str]]:
            request = GenerationRequest(
                request_id=f"{call_id}-{number}",
                prompt_token_ids=contexts[number].token_ids,
                sampling=fitted,
                n=n,
                stream=bool(call.stream or call.stop),
                top_logprobs=call.logprobs or 0,
            )
            piece = None if stream is None else stream.pieces_of(number * n)
            return await collect_samples(
                answer_context.generate(request, number), n, lambda: self._chat.text_stream(call.stops), piece
            )

        with session.reserving(len(contexts) * n * fitted.max_tokens):
            if len(contexts) == 1:
                sampled = [await sample_one(0)]
            else:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        sampling_calls = [tasks.create_task(sample_one(number)) for number in range(len(contexts))]
                except ExceptionGroup as failed:
                    # The first that failed ended the others: the call failed as it did.
                    raise failed.exceptions[0] from failed
                sampled = [task.result() for task in sampling_calls]
            # Captured only once a client listens: this one, or its retry.
            await answer.heard()
        finished = [[sample.reader.finish() for sample in samples] for samples in sampled]  # type: ignore[attr-defined]
        nodes: list[NodeRecord] = []
        for prompt, context, samples, texts in zip(prompts, contexts, sampled, finished, strict=True):
            before = prompt if isinstance(prompt, str) else self._renderer.decode(prompt)
            for node, (_, text) in zip(written(context, samples), texts, strict=True):
                seen = (before + text).encode("utf-8", "replace")
                nodes.append(msgspec.structs.replace(node, text=(digest_of(seen), len(seen))))
        prompt_tokens = sum(len(context.token_ids) for context in contexts)
        if stream is not None:
            stream.close(sampled, finished, prompt_tokens)
        else:
            said = [[text for _, text in each] for each in finished]
            answer.stage(whole_text(self._texts, head, call, sampled, said, contexts, prompt_tokens))
        await answer_context.settle(nodes, sampling, sampled[-1][0].finish_reason)

    async def _find_context(self, session: Session, prompt: str | list[int]) -> Context:
        if isinstance(prompt, list):
            parent = session.capture.find(prompt)
            return Context(prompt, parent, None if parent is not None else self._why(session, prompt))
        found = session.memory.texts.longest(prompt.encode())
        if found is not None:
            node, length = found
            # What was remembered is whole text, so what follows it begins with a whole character.
            rest = prompt.encode()[length:].decode()
            return Context([*path(node), *await self._renderer.encode(rest)], node, None)
        tokens = await self._renderer.encode(prompt)
        parent = session.capture.find(tokens)
        return Context(tokens, parent, None if parent is not None else self._why(session, tokens))

    def _why(self, session: Session, prompt: list[int]) -> BreakReason | None:
        """Why a prompt extends nothing that was captured."""
        if not session.capture.roots:
            return None
        text = self._renderer.decode(prompt).encode("utf-8", "replace")
        if session.memory.texts.longest(text) is not None:
            return "retokenization"
        return why_no_prefix(session, prompt)


def prompts_of(call: CompletionCall) -> list[str | list[int]]:
    """Each a text or token ids. Raises UsageError for more than `MOST_ANSWERS` answers."""
    prompt = call.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) * (call.n or 1) > MOST_ANSWERS:
        raise UsageError(f"{len(prompt)} prompts with n = {call.n or 1}", f"ask for {MOST_ANSWERS} answers at most")
    return list(prompt)


def whole_text(
    texts: chunks.TokenTexts,
    head: chunks.AnswerHead,
    call: CompletionCall,
    sampled: Sequence[Sequence[Sample[str]]],
    said: Sequence[Sequence[str]],
    contexts: Sequence[Context],
    prompt_tokens: int,
) -> bytes:
    """The answer in one piece. Token fields are there only where they were asked for."""
    choices: list[CompletionChoice] = []
    for samples, answers, context in zip(sampled, said, contexts, strict=True):
        for sample, text in zip(samples, answers, strict=True):
            choice = CompletionChoice(
                index=len(choices),
                text=text,
                finish_reason=sample.finish_reason or "stop",
                stop_reason=sample.stop_reason(call.stop_token_ids),
            )
            if call.logprobs is not None:
                entries = text_logprobs(texts, call, sample, 0, 0)
                choice.logprobs = CompletionLogprobs.model_validate(entries, from_attributes=True)
            if call.return_token_ids:
                choice.token_ids, choice.policy_versions = sample.token_ids, sample.policy_versions
                choice.prompt_token_ids = context.token_ids
            choices.append(choice)
    count = _count(sampled)
    completion = Completion(
        id=head.call_id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=count, total_tokens=prompt_tokens + count),
    )
    unasked: Any = _NOT_HERE if call.return_token_ids else _NOT_HERE | _TOKEN_FIELDS
    return completion.model_dump_json(exclude={"choices": {"__all__": unasked}}).encode()


class TextChunks:
    """The events of one streamed text completion. `contexts`: of each prompt, whose `n` choices follow each other.

    As in vLLM, `prompt_token_ids` (where they were asked for) come in the first chunk of each choice and in no other.
    """

    def __init__(
        self,
        call: CompletionCall,
        head: chunks.AnswerHead,
        texts: chunks.TokenTexts,
        answer_context: AnswerContext,
        contexts: Sequence[Context],
    ) -> None:
        self._call = call
        self._head = head
        self._texts = texts
        self._answer_context = answer_context
        self._contexts = contexts
        self._said: dict[int, int] = {}

    def pieces_of(self, first: int) -> Callable[[Sample[str], str, int], None]:
        """Told of the growth of samples of one prompt, whose choices are numbered from `first`."""

        def piece(sample: Sample[str], text: str, grown: int) -> None:
            if text or self._call.logprobs is not None or self._call.return_token_ids:
                self._answer_context.show(self._chunk(first + sample.index, sample, text, grown))

        return piece

    def close(
        self,
        sampled: Sequence[Sequence[Sample[str]]],
        finished: Sequence[Sequence[tuple[str, str]]],
        prompt_tokens: int,
    ) -> None:
        """Stage the last chunks: what was held back, why each sample ended, and the usage if it was asked for."""
        number = 0
        for samples, texts in zip(sampled, finished, strict=True):
            for sample, (rest, _) in zip(samples, texts, strict=True):
                self._answer_context.answer.stage(self._chunk(number, sample, rest, 0, ended=True))
                number += 1
        if self._call.stream_options is not None and self._call.stream_options.include_usage:
            count = _count(sampled)
            usage = self._new([])
            usage.usage = chunks.UsagePart(prompt_tokens, count, prompt_tokens + count)
            self._answer_context.answer.stage(chunks.event(usage))
        self._answer_context.answer.stage(DONE)

    def _new(self, choices: list[chunks.TextChunkChoice]) -> chunks.TextChunk:
        return chunks.TextChunk(self._head.call_id, self._head.created, self._head.model, choices)

    def _chunk(self, number: int, sample: Sample[str], text: str, grown: int, *, ended: bool = False) -> bytes:
        call = self._call
        choice = chunks.TextChunkChoice(number, text)
        if call.return_token_ids and number not in self._said:
            choice.prompt_token_ids = self._contexts[number // (call.n or 1)].token_ids
        offset = self._said.get(number, 0)
        self._said[number] = offset + len(text)
        start = len(sample.token_ids) - grown
        if call.logprobs is not None and grown:
            choice.logprobs = text_logprobs(self._texts, call, sample, start, offset)
        if call.return_token_ids:
            choice.token_ids = sample.token_ids[start:]
        if ended:
            choice.finish_reason = sample.finish_reason or "stop"
            choice.stop_reason = sample.stop_reason(call.stop_token_ids)
            if call.return_token_ids:
                choice.policy_versions = sample.policy_versions
        return chunks.event(self._new([choice]))


def text_logprobs(
    texts: chunks.TokenTexts, call: CompletionCall, sample: Sample[str], start: int, offset: int
) -> chunks.TextLogprobsPart:
    """Of the tokens from `start` on; `offset`: characters of text before them.

    As OpenAI's API and vLLM have it, `top_logprobs` hold the sampled token too, whether it is among the likeliest or not:
    N + 1 entries at most, one with `logprobs=0`. Of two tokens of the same text (parts of characters) the sampled one, or
    else the likelier one, has the entry.
    """
    as_ids = bool(call.return_tokens_as_token_ids)
    sampled, logprobs = sample.token_ids[start:], sample.logprobs[start:]
    tokens = [texts.text(token, as_ids=as_ids) for token in sampled]
    lengths = [len(texts.text(token)) for token in sampled]
    top = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
    # Empty where the call asked for no others.
    for entries, likeliest in zip(top, sample.top_logprobs[start:], strict=False):
        for other, logprob in likeliest:
            entries.setdefault(texts.text(other, as_ids=as_ids), logprob)
    return chunks.TextLogprobsPart(
        tokens=tokens,
        token_logprobs=logprobs,
        top_logprobs=top,
        text_offset=[offset + before for before in accumulate([0, *lengths[:-1]])] if lengths else [],
    )


def _count(sampled: Sequence[Sequence[Sample[str]]]) -> int:
    return sum(len(sample.token_ids) for samples in sampled for sample in samples)
