"""One chat completion: messages to a prompt that extends what was captured, drawn tokens to a message, both remembered.

messages ──match──► the captured call they continue ──extend──► prompt      only new messages are rendered
            └─ none: rendered whole, a new segment that says why
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rollout_server.answers import Answer
from rollout_server.capture import Node, path
from rollout_server.chat.answer_stream import AnswerDelta
from rollout_server.chat.answers import ParsedAnswer
from rollout_server.chat.chat_renderer import ChatRenderer
from rollout_server.chat.messages import message_digest, reasoning_digest, tools_digest
from rollout_server.dialect.caller import Context, fit, record
from rollout_server.dialect.chunks import (
    DONE,
    ChatChunk,
    ChatChunkChoice,
    DeltaPart,
    FunctionPart,
    LogprobsPart,
    ToolCallPart,
    UsagePart,
    event,
)
from rollout_server.dialect.drawing import Sample, draw
from rollout_server.dialect.sampling_choice import choose_sampling
from rollout_server.dialect.token_texts import TokenTexts
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.rendering import LONG_TEXT
from rollout_server.sessions import Session
from services.wire.errors import UnsupportedParameterError
from services.wire.openai_api import AnswerMessage, ChatCall, ChatChoice, ChatCompletion, ChatLogprobs, Usage

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
_UNSET = msgspec.UNSET
_TOKEN_FIELDS: Any = {"prompt_token_ids": True, "choices": {"__all__": {"token_ids", "policy_versions"}}}


class ChatCalls:
    """Makes chat completions over one engine. `model`: the name that answers carry."""

    def __init__(self, engine: Engine, chat: ChatRenderer, texts: TokenTexts, model: str) -> None:
        self._engine = engine
        self._chat = chat
        self._texts = texts
        self._model = model

    async def produce(self, session: Session, call: ChatCall, call_id: str, answer: Answer) -> None:
        """Draw and capture the answer to `call`; chunks go to `answer`.

        Raises UnsupportedParameterError, TemplateError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        if refused := call.unsupported():
            raise UnsupportedParameterError(f"{', '.join(refused)} cannot be had here", "leave it out")
        messages = [message.model_dump(exclude_none=True) for message in call.messages]
        offered = call.tools if call.tool_choice != "none" else None
        tools = [tool.model_dump(exclude_none=True) for tool in offered] if offered else None
        if sum(len(str(message.get("content", ""))) for message in messages) > LONG_TEXT:
            context = await asyncio.to_thread(self._place, session, messages, tools)
        else:
            context = self._place(session, messages, tools)
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
        chunks = _Chunks(call, call_id, self._model, self._texts, answer) if call.stream else None
        with session.reserving(n * request.sampling.max_tokens):
            samples = await draw(
                self._engine,
                request,
                lambda: self._chat.answer_stream(context.token_ids, tools, call.stops),
                chunks.piece if chunks is not None else None,
            )
            # An answer that nobody hears is none: it is captured for whoever asks for it again.
            await answer.heard()
        finished = [sample.reader.finish() for sample in samples]  # type: ignore[attr-defined]
        nodes = record(session, call_id, context, samples, sampling)
        self._remember(session, messages, tools, nodes, [parsed for _, parsed in finished])
        prompt = context.token_ids
        if chunks is not None:
            chunks.close(samples, finished, prompt)
        else:
            whole = self._whole(call, call_id, samples, [parsed for _, parsed in finished], prompt)
            # Token fields are there only where they were asked for; other fields may be null, as OpenAI's are.
            unasked = None if call.return_token_ids else _TOKEN_FIELDS
            answer.put(whole.model_dump_json(exclude=unasked).encode())

    def _place(self, session: Session, messages: list[Message], tools: Tools) -> Context:
        """The prompt of a call. CPU work: about 0.2 ms for a short conversation."""
        match = session.memory.conversations.match(messages, tools)
        reason = match.reason
        if match.node is not None:
            node = match.node
            before = path(node)[: node.end - len(node.drawn)]
            extended = self._chat.extend(before, list(node.drawn), messages[match.new_from :], tools)
            if extended is not None:
                return Context(extended, node, None)
            reason = "template"
        rendered = self._chat.render(messages, tools)
        # A template may be so regular that a whole rendering extends what was captured, token for token.
        return Context(rendered, session.capture.find(rendered), reason)

    def _remember(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Tools,
        nodes: Sequence[Node],
        answers: Sequence[ParsedAnswer],
    ) -> None:
        memory = session.memory
        digests = [message_digest(message) for message in messages]
        offered = tools_digest(tools)
        for node, parsed in zip(nodes, answers, strict=True):
            said = _message(parsed).model_dump(exclude_none=True)
            memory.conversations.remember(
                [*digests, message_digest(said)], offered, node, reasoning=reasoning_digest(said)
            )
            known = 0 if node.parent is None else _messages_before(session, node.parent)
            memory.messages[node] = msgspec.json.encode([*messages[known:], said])

    def _whole(
        self,
        call: ChatCall,
        call_id: str,
        samples: Sequence[Sample[AnswerDelta]],
        answers: Sequence[ParsedAnswer],
        prompt: list[int],
    ) -> ChatCompletion:
        choices = []
        for sample, parsed in zip(samples, answers, strict=True):
            choice = ChatChoice(
                index=sample.index,
                message=_message(parsed),
                finish_reason=_finish_reason(sample, parsed),
                stop_reason=stop_reason(sample, call.stop_token_ids),
            )
            if call.logprobs:
                entries = self._texts.entries(
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
        return ChatCompletion(
            id=call_id,
            created=int(time.time()),
            model=self._model,
            choices=choices,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=drawn, total_tokens=len(prompt) + drawn),
            prompt_token_ids=prompt if call.return_token_ids else None,
        )


class _Chunks:
    """The events of one streamed chat completion."""

    def __init__(self, call: ChatCall, call_id: str, model: str, texts: TokenTexts, answer: Answer) -> None:
        self._call = call
        self._new: Callable[[list[ChatChunkChoice]], ChatChunk] = lambda choices: ChatChunk(
            call_id, created, model, choices
        )
        created = int(time.time())
        self._texts = texts
        self._answer = answer
        self._begun: set[int] = set()

    def piece(self, sample: Sample[AnswerDelta], said: AnswerDelta, grown: int) -> None:
        """A sample has grown. Without logprobs and token ids to tell of, what says nothing is not sent."""
        if not said and not self._call.logprobs and not self._call.return_token_ids:
            return
        self._send(sample, said, grown)

    def close(
        self,
        samples: Sequence[Sample[AnswerDelta]],
        finished: Sequence[tuple[AnswerDelta, ParsedAnswer]],
        prompt: list[int],
    ) -> None:
        """The last chunks: what was held back, why each sample ended, and the usage if it was asked for."""
        for sample, (rest, parsed) in zip(samples, finished, strict=True):
            self._send(sample, rest, 0, _finish_reason(sample, parsed), prompt)
        options = self._call.stream_options
        if options is not None and options.include_usage:
            drawn = sum(len(sample.token_ids) for sample in samples)
            usage = self._new([])
            usage.usage = UsagePart(len(prompt), drawn, len(prompt) + drawn)
            self._answer.put(event(usage))
        self._answer.put(DONE)

    def _send(
        self,
        sample: Sample[AnswerDelta],
        said: AnswerDelta,
        grown: int,
        finish_reason: str | None = None,
        prompt: list[int] | None = None,
    ) -> None:
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
            choice.stop_reason = stop_reason(sample, call.stop_token_ids)
        chunk = self._new([choice])
        if call.return_token_ids:
            choice.token_ids = sample.token_ids[new]
            if finish_reason is not None:
                choice.policy_versions = sample.policy_versions
                chunk.prompt_token_ids = prompt if prompt is not None else _UNSET
        self._answer.put(event(chunk))


def stop_reason(sample: Sample[Any], stop_token_ids: Sequence[int] | None) -> int | str | None:
    """The stop string or the call's own stop token that ended an answer."""
    if sample.reader.stopped is not None:
        return sample.reader.stopped
    last = sample.token_ids[-1] if sample.token_ids else None
    return last if sample.finish_reason == "stop" and last in (stop_token_ids or ()) else None


def _finish_reason(sample: Sample[AnswerDelta], parsed: ParsedAnswer) -> str:
    reason = sample.finish_reason or "stop"
    return "tool_calls" if reason == "stop" and parsed.tool_calls else reason


def _message(parsed: ParsedAnswer) -> AnswerMessage:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments_json}} for call in parsed.tool_calls
    ]
    return AnswerMessage.model_validate(
        {"content": parsed.content, "reasoning_content": parsed.reasoning_content, "tool_calls": calls or None}
    )


def _messages_before(session: Session, node: Node) -> int:
    """How many messages the conversation had when `node` was answered, its answer counted."""
    known = 0
    at: Node | None = node
    while at is not None:
        kept = session.memory.messages.get(at)
        known += len(msgspec.json.decode(kept, type=list[msgspec.Raw])) if kept is not None else 0
        at = at.parent
    return known
