"""Chat completions: messages become a prompt that extends captured tokens, sampled tokens become a message.

messages ──match──► the captured call they continue ──extend──► prompt      only new messages are rendered
            └─ none: rendered whole, a new segment that says why
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec

from rollout_server.chat.answer_stream import AnswerDelta
from rollout_server.chat.answers import ParsedAnswer
from rollout_server.chat.messages import message_digest, reasoning_digest, tools_digest
from rollout_server.chat.renderer import ChatRenderer
from rollout_server.chat.tokenizer import LONG_TEXT
from rollout_server.completions import chunks
from rollout_server.completions.base import AnswerContext, Context, fit, written
from rollout_server.completions.samples import Sample, collect_samples
from rollout_server.completions.sampling import choose_sampling
from rollout_server.engines.base import Engine, GenerationRequest
from rollout_server.journal.records import SaidRecord
from rollout_server.sessions.capture import path
from rollout_server.sessions.session import Session
from services.http.app import DONE
from services.wire.errors import ContextLengthError, UnsupportedParameterError
from services.wire.openai_api import (
    AnswerMessage,
    ChatCall,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Usage,
)

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Rendered = TypeVar("Rendered")


class ChatCalls:
    """Makes chat completions over one engine. `model`: the name that answers carry. `large`: works on large calls."""

    def __init__(
        self, engine: Engine, chat: ChatRenderer, texts: chunks.TokenTexts, model: str, large: Executor | None = None
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._texts = texts
        self._model = model
        self._large = large

    async def produce(self, call: ChatCall, answer_context: AnswerContext) -> None:
        """Generate and capture the answer to `call`.

        Raises UnsupportedParameterError, TemplateError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        refused = call.unsupported()
        if call.reasoning_effort is not None and self._chat.heeds_effort(call.reasoning_effort):
            refused.append("reasoning_effort")
        if refused:
            raise UnsupportedParameterError(f"{', '.join(refused)}: not supported here", "leave it out")
        session, call_id, answer = answer_context.session, answer_context.call_id, answer_context.answer
        n, longest = call.n or 1, self._engine.max_model_len
        if len(call.messages) >= longest > 0:  # a message takes a token at least
            raise ContextLengthError(len(call.messages), longest, at_least=True)
        messages, digests = await self._aside(call.messages, lambda: _read(call), _LONG_TO_READ)
        offered = call.tools if call.tool_choice != "none" else None
        tools = [tool.model_dump(exclude_none=True) for tool in offered] if offered else None
        context = await self._find_context(session, call, messages, digests, tools)
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
        head = chunks.AnswerHead(call_id, answer_context.created, self._model)
        stream = ChatChunks(call, head, self._texts, answer_context, context.token_ids) if call.stream else None
        ids = answer_context.tool_call_ids()
        with session.reserving(n * request.sampling.max_tokens):
            samples = await collect_samples(
                answer_context.generate(request),
                n,
                lambda: self._chat.answer_stream(context.token_ids, tools, call.stops, ids(), whole=stream is None),
                stream.piece if stream is not None else None,
            )
            # Captured only once a client listens: this one, or its retry.
            await answer.heard()
        finished = [sample.reader.finish() for sample in samples]  # type: ignore[attr-defined]
        parsed = [whole for _, whole in finished]
        if stream is not None:
            stream.close(samples, finished)
        else:
            answer.stage(whole_chat(self._texts, head, call, samples, parsed, context.token_ids))
        said = self._said(session, messages, context, parsed)
        nodes = [
            msgspec.structs.replace(node, said=each) for node, each in zip(written(context, samples), said, strict=True)
        ]
        await answer_context.settle(
            nodes, sampling, samples[0].finish_reason, digests=b"".join(digests), tools=tools_digest(tools)
        )

    async def _find_context(
        self, session: Session, call: ChatCall, messages: list[Message], digests: list[bytes], tools: Tools
    ) -> Context:
        """The prompt of a call. CPU work: about 0.2 ms for a short conversation."""
        if tools:
            session.unrendered_tools |= not self._chat.check_tools(messages)
        match = session.memory.conversations.match(messages, tools, digests)
        reason = match.reason
        if match.node is not None:
            node = match.node
            before = path(node)[: node.end - len(node.sampled)]
            new = messages[match.new_from :]
            extended = await self._aside(
                call.messages[match.new_from :],
                lambda: self._chat.extend(before, list(node.sampled), new, tools),
            )
            if extended is not None:
                return Context(extended, node, None)
            reason = "template"
        rendered = await self._aside(call.messages, lambda: self._chat.render(messages, tools))
        # A template may be so regular that a whole rendering extends what was captured, token for token.
        return Context(rendered, session.capture.find(rendered), reason)

    async def _aside(
        self, messages: Sequence[ChatMessage], work: Callable[[], Rendered], long: int = LONG_TEXT
    ) -> Rendered:
        """Do the work of some messages, on a thread if it is that of more than `long` characters.

        What a session has captured is only looked at on the event loop.
        """
        size = sum(map(_size, messages))
        if size <= long:
            return work()
        if size > _LARGE:
            return await asyncio.get_running_loop().run_in_executor(self._large, work)
        return await asyncio.to_thread(work)

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


def _read(call: ChatCall) -> tuple[list[Message], list[bytes]]:
    """The messages of a call, and their digests."""
    messages = [message.model_dump(exclude_none=True) for message in call.messages]
    return messages, [message_digest(message) for message in messages]


_A_MESSAGE = 64
"""Characters whose work is that of a message's own."""
_LONG_TO_READ = 8 * LONG_TEXT
_LARGE = 64 * LONG_TEXT


def _size(message: ChatMessage) -> int:
    """How much work a message is, in characters."""
    content, calls = message.content, message.tool_calls or ()
    size = _A_MESSAGE + len(message.reasoning_content or "") + sum(len(each.function.arguments) for each in calls)
    return size + (len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content or ()))


_TOKEN_FIELDS: Any = {"prompt_token_ids": True, "choices": {"__all__": {"token_ids", "policy_versions"}}}


def whole_chat(
    texts: chunks.TokenTexts,
    head: chunks.AnswerHead,
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
            choice.logprobs = ChatLogprobs.model_validate(chunks.LogprobsPart(entries), from_attributes=True)
        if call.return_token_ids:
            choice.token_ids, choice.policy_versions = sample.token_ids, sample.policy_versions
        choices.append(choice)
    sampled = sum(len(sample.token_ids) for sample in samples)
    completion = ChatCompletion(
        id=head.call_id,
        created=head.created,
        model=head.model,
        choices=choices,
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=sampled, total_tokens=len(prompt) + sampled),
        prompt_token_ids=prompt if call.return_token_ids else None,
    )
    unasked = None if call.return_token_ids else _TOKEN_FIELDS
    return completion.model_dump_json(exclude=unasked).encode()


class ChatChunks:
    """The events of one streamed chat completion.

    As in vLLM, `prompt_token_ids` (where they were asked for) come in the first chunk of each sample and in no other: a
    client that stops reading early has them, and one that joins turns needs them before the tokens.
    """

    def __init__(
        self,
        call: ChatCall,
        head: chunks.AnswerHead,
        texts: chunks.TokenTexts,
        context: AnswerContext,
        prompt: list[int],
    ) -> None:
        self._call = call
        self._head = head
        self._texts = texts
        self._context = context
        self._prompt = prompt
        self._begun: set[int] = set()

    def piece(self, sample: Sample[AnswerDelta], said: AnswerDelta, grown: int) -> None:
        """A sample has grown. Without logprobs and token ids to tell of, what says nothing is not sent."""
        if not said and not self._call.logprobs and not self._call.return_token_ids:
            return
        self._context.show(self._chunk(sample, said, grown))

    def close(
        self, samples: Sequence[Sample[AnswerDelta]], finished: Sequence[tuple[AnswerDelta, ParsedAnswer]]
    ) -> None:
        """Stage the last chunks: what was held back, why each sample ended, and the usage if it was asked for."""
        for sample, (rest, parsed) in zip(samples, finished, strict=True):
            self._context.answer.stage(self._chunk(sample, rest, 0, finish_reason(sample, parsed)))
        options = self._call.stream_options
        if options is not None and options.include_usage:
            sampled = sum(len(sample.token_ids) for sample in samples)
            usage, before = self._new([]), len(self._prompt)
            usage.usage = chunks.UsagePart(before, sampled, before + sampled)
            self._context.answer.stage(chunks.event(usage))
        self._context.answer.stage(DONE)

    def _new(self, choices: list[chunks.ChatChunkChoice]) -> chunks.ChatChunk:
        return chunks.ChatChunk(self._head.call_id, self._head.created, self._head.model, choices)

    def _chunk(
        self, sample: Sample[AnswerDelta], said: AnswerDelta, grown: int, finish_reason: str | None = None
    ) -> bytes:
        call, first = self._call, sample.index not in self._begun
        self._begun.add(sample.index)
        calls = [
            chunks.ToolCallPart(one.index, one.id, chunks.FunctionPart(one.name, one.arguments))
            for one in said.tool_calls
        ]
        delta = chunks.DeltaPart(
            role="assistant" if first else None,
            content=said.content or ("" if first and not said.reasoning_content and not calls else None),
            reasoning_content=said.reasoning_content or None,
            tool_calls=calls or None,
        )
        choice = chunks.ChatChunkChoice(sample.index, delta, finish_reason)
        new = slice(len(sample.token_ids) - grown, None) if grown else slice(0, 0)
        if call.logprobs and grown:
            entries = self._texts.entries(
                sample.token_ids[new],
                sample.logprobs[new],
                sample.top_logprobs[new],
                as_ids=bool(call.return_tokens_as_token_ids),
            )
            choice.logprobs = chunks.LogprobsPart(entries)
        if finish_reason is not None:
            choice.stop_reason = sample.stop_reason(call.stop_token_ids)
        chunk = self._new([choice])
        if call.return_token_ids:
            choice.token_ids = sample.token_ids[new]
            if first:
                chunk.prompt_token_ids = self._prompt
            if finish_reason is not None:
                choice.policy_versions = sample.policy_versions
        return chunks.event(chunk)


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
