"""One chat completion: messages to a prompt that extends what was captured, drawn tokens to a message, both remembered.

messages ──match──► the captured call they continue ──extend──► prompt      only new messages are rendered
            └─ none: rendered whole, a new segment that says why
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rollout_server.capture import path
from rollout_server.chat.answers import ParsedAnswer
from rollout_server.chat.chat_renderer import ChatRenderer
from rollout_server.chat.messages import message_digest, reasoning_digest, tools_digest
from rollout_server.dialect.caller import Context, fit, written
from rollout_server.dialect.chat_answers import ChatChunks, assistant_message, whole_chat
from rollout_server.dialect.chunks import AnswerHead
from rollout_server.dialect.drawing import draw
from rollout_server.dialect.making import Making
from rollout_server.dialect.sampling_choice import choose_sampling
from rollout_server.dialect.token_texts import TokenTexts
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.journal_records import SaidRecord
from rollout_server.rendering import LONG_TEXT
from rollout_server.sessions import Session
from services.wire.errors import UnsupportedParameterError
from services.wire.openai_api import ChatCall

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Rendered = TypeVar("Rendered")


class ChatCalls:
    """Makes chat completions over one engine. `model`: the name that answers carry."""

    def __init__(self, engine: Engine, chat: ChatRenderer, texts: TokenTexts, model: str) -> None:
        self._engine = engine
        self._chat = chat
        self._texts = texts
        self._model = model

    async def produce(self, call: ChatCall, making: Making) -> None:
        """Draw and capture the answer to `call`.

        Raises UnsupportedParameterError, TemplateError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        if refused := call.unsupported():
            raise UnsupportedParameterError(f"{', '.join(refused)} cannot be had here", "leave it out")
        session, call_id, answer = making.session, making.call_id, making.answer
        messages = [message.model_dump(exclude_none=True) for message in call.messages]
        offered = call.tools if call.tool_choice != "none" else None
        tools = [tool.model_dump(exclude_none=True) for tool in offered] if offered else None
        context, digests = await self._place(session, messages, tools)
        n, longest = call.n or 1, self._engine.max_model_len
        limit = call.max_completion_tokens if call.max_completion_tokens is not None else call.max_tokens
        sampling = choose_sampling(session.terms.sampling, call, limit, self._chat.stop_token_ids, longest)
        request = GenerationRequest(
            request_id=call_id,
            prompt_token_ids=context.token_ids,
            sampling=fit(session, sampling, [context], n, longest),
            n=n,
            stream=bool(call.stream or call.stop),
            top_logprobs=(call.top_logprobs or 0) if call.logprobs else 0,
        )
        head = AnswerHead(call_id, making.created, self._model)
        chunks = ChatChunks(call, head, self._texts, answer) if call.stream else None
        ids = making.tool_call_ids()
        with session.reserving(n * request.sampling.max_tokens):
            samples = await draw(
                making.draw(request),
                n,
                lambda: self._chat.answer_stream(context.token_ids, tools, call.stops, ids()),
                chunks.piece if chunks is not None else None,
            )
            # An answer that nobody hears is none: it is captured for whoever asks for it again.
            await answer.heard()
        finished = [sample.reader.finish() for sample in samples]  # type: ignore[attr-defined]
        parsed = [whole for _, whole in finished]
        if chunks is not None:
            chunks.close(samples, finished, context.token_ids)
        else:
            answer.stage(whole_chat(self._texts, head, call, samples, parsed, context.token_ids))
        said = self._said(session, messages, context, parsed)
        nodes = [
            msgspec.structs.replace(node, said=each) for node, each in zip(written(context, samples), said, strict=True)
        ]
        await making.settle(
            nodes, sampling, samples[0].finish_reason, digests=b"".join(digests), tools=tools_digest(tools)
        )

    async def _place(self, session: Session, messages: list[Message], tools: Tools) -> tuple[Context, list[bytes]]:
        """The prompt of a call, and its messages' digests. CPU work: about 0.2 ms for a short conversation."""
        digests = [message_digest(message) for message in messages]
        match = session.memory.conversations.match(messages, tools, digests)
        reason = match.reason
        if match.node is not None:
            node = match.node
            before = path(node)[: node.end - len(node.drawn)]
            new = messages[match.new_from :]
            extended = await _aside(new, lambda: self._chat.extend(before, list(node.drawn), new, tools))
            if extended is not None:
                return Context(extended, node, None), digests
            reason = "template"
        rendered = await _aside(messages, lambda: self._chat.render(messages, tools))
        # A template may be so regular that a whole rendering extends what was captured, token for token.
        return Context(rendered, session.capture.find(rendered), reason), digests

    def _said(
        self, session: Session, messages: Sequence[Message], context: Context, answers: Sequence[ParsedAnswer]
    ) -> list[SaidRecord]:
        """What is remembered of each answer: of the messages before it, those that its parent does not have."""
        before = None if context.parent is None else session.memory.said.get(context.parent)
        new = messages[0 if before is None else before.total :]
        records = []
        for parsed in answers:
            said = assistant_message(parsed).model_dump(exclude_none=True)
            packed = msgspec.json.encode([*new, said])
            records.append(SaidRecord(message_digest(said), reasoning_digest(said), len(messages) + 1, packed))
        return records


async def _aside(messages: Sequence[Message], work: Callable[[], Rendered]) -> Rendered:
    """Render long messages on a thread. What a session has captured is only looked at on the event loop."""
    if sum(len(str(message.get("content", ""))) for message in messages) > LONG_TEXT:
        return await asyncio.to_thread(work)
    return work()
