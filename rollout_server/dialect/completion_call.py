"""One text completion: prompts as text or as tokens, each extending what was captured where it can.

    text    the whole text of a captured call, and more ──► its tokens, and only the rest encoded
            anything else ──► encoded whole
    tokens  the path of a captured call, and more ──► a child of it
            anything else ──► a root, with the reason why

An agent that keeps its transcript as text thereby goes on from the very tokens that were drawn.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from rollout_server.capture import path
from rollout_server.chat.chat_renderer import ChatRenderer
from rollout_server.dialect.caller import Context, fit, why_no_prefix, written
from rollout_server.dialect.chunks import AnswerHead
from rollout_server.dialect.completion_answers import TextChunks, whole_text
from rollout_server.dialect.drawing import Sample, draw
from rollout_server.dialect.making import Making
from rollout_server.dialect.sampling_choice import choose_sampling
from rollout_server.dialect.token_texts import TokenTexts
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.journal_records import NodeRecord
from rollout_server.prefix_index import digest_of
from rollout_server.rendering import Renderer
from rollout_server.sessions import Session
from services.wire.errors import UnsupportedParameterError, UsageError
from services.wire.openai_api import CompletionCall
from services.wire.trajectory import BreakReason

_MOST_ANSWERS = 256
_TOKEN_FIELDS: Any = {"choices": {"__all__": {"token_ids", "policy_versions", "prompt_token_ids"}}}


class CompletionCalls:
    """Makes text completions over one engine. `model`: the name that answers carry."""

    def __init__(self, engine: Engine, renderer: Renderer, chat: ChatRenderer, texts: TokenTexts, model: str) -> None:
        self._engine = engine
        self._renderer = renderer
        self._chat = chat
        self._texts = texts
        self._model = model

    async def produce(self, call: CompletionCall, making: Making) -> None:
        """Draw and capture the answers to all prompts of `call`.

        Raises UnsupportedParameterError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        if refused := call.unsupported():
            raise UnsupportedParameterError(f"{', '.join(refused)} cannot be had here", "leave it out")
        session, call_id, answer = making.session, making.call_id, making.answer
        prompts = _prompts(call)
        if len(prompts) * (call.n or 1) > _MOST_ANSWERS:
            raise UsageError(
                f"{len(prompts)} prompts with n = {call.n or 1}", f"ask for {_MOST_ANSWERS} answers at most"
            )
        contexts = [await self._place(session, prompt) for prompt in prompts]
        n, longest = call.n or 1, self._engine.max_model_len
        limit = 16 if call.max_tokens is None else call.max_tokens  # OpenAI's default for this route
        sampling = choose_sampling(session.terms.sampling, call, limit, (), longest)
        fitted = fit(session, sampling, contexts, n, longest)
        head = AnswerHead(call_id, making.created, self._model)
        chunks = TextChunks(call, head, self._texts, answer) if call.stream else None

        async def draw_one(number: int) -> list[Sample[str]]:
            request = GenerationRequest(
                request_id=f"{call_id}-{number}",
                prompt_token_ids=contexts[number].token_ids,
                sampling=fitted,
                n=n,
                stream=bool(call.stream or call.stop),
                top_logprobs=call.logprobs or 0,
            )
            piece = None if chunks is None else chunks.pieces_of(number * n)
            return await draw(making.draw(request, number), n, lambda: self._chat.text_stream(call.stops), piece)

        with session.reserving(len(contexts) * n * fitted.max_tokens):
            if len(contexts) == 1:
                drawn = [await draw_one(0)]
            else:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        drawing = [tasks.create_task(draw_one(number)) for number in range(len(contexts))]
                except ExceptionGroup as failed:
                    # The first that failed ended the others: the call failed as it did.
                    raise failed.exceptions[0] from failed
                drawn = [task.result() for task in drawing]
            # An answer that nobody hears is none: it is captured for whoever asks for it again.
            await answer.heard()
        finished = [[sample.reader.finish() for sample in samples] for samples in drawn]  # type: ignore[attr-defined]
        nodes: list[NodeRecord] = []
        for prompt, context, samples, texts in zip(prompts, contexts, drawn, finished, strict=True):
            before = prompt if isinstance(prompt, str) else self._renderer.decode(prompt)
            for node, (_, text) in zip(written(context, samples), texts, strict=True):
                seen = (before + text).encode("utf-8", "replace")
                nodes.append(msgspec.structs.replace(node, text=(digest_of(seen), len(seen))))
        prompt_tokens = sum(len(context.token_ids) for context in contexts)
        if chunks is not None:
            chunks.close(drawn, finished, contexts, prompt_tokens)
        else:
            said = [[text for _, text in each] for each in finished]
            answer.stage(whole_text(self._texts, head, call, drawn, said, contexts, prompt_tokens))
        await making.settle(nodes, sampling, drawn[-1][0].finish_reason)

    async def _place(self, session: Session, prompt: str | list[int]) -> Context:
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


def _prompts(call: CompletionCall) -> list[str | list[int]]:
    prompt = call.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)
