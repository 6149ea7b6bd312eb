"""Answers to generation calls in a session: generated once per call, retries get the same answer.

HTTP call ──► a retry? ──► the answer that is there
                └─ no ──► task: render ─► generate ─► (a client listens) ─► captured ─► last chunks
                             ends early: deadline, abort, expiry, no client listens, the engine makes no progress
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec
from redis.exceptions import RedisError

from rollout_server.completions.resumable import PartialAnswer, Progress, UntilAccepting, resume
from rollout_server.completions.samples import Piece, Sample
from rollout_server.completions.sampling import BudgetSpentError, within
from rollout_server.engines.base import Engine, EngineCrashedError, FinishReason, GenerationDelta, GenerationRequest
from rollout_server.journal.journal import Journal
from rollout_server.journal.records import Answered, NodeRecord, PartialHead, PartialPart
from rollout_server.journal.replay import apply_answer, node_record
from rollout_server.sessions.capture import Node
from rollout_server.sessions.group import GroupRegistry
from rollout_server.sessions.responses import Answer, RequestKey
from rollout_server.sessions.session import Session
from services.observability.tracing import NO_TRACING, Span, Tracing
from services.wire.errors import ContextLengthError, DeadlineError, NotReadyError, RollmeshError, UsageError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import BreakReason, VersionSpan

_KEPT_BYTES = 1 << 20
_DIGITS = 24


@dataclass(frozen=True)
class Recorded:
    """What is written down of the engine's choices in training calls: `masks`, which tokens the cuts left
    (`rollout.sampling_masks`); `experts`, which ones a mixture chose (`rollout.routing_replay`)."""

    masks: bool = False
    experts: bool = False


RECORDED = Recorded()
"""Nothing."""


@dataclass(frozen=True)
class AnswerDeps:
    """What answers are made with. `partial_every`: tokens after which is journaled what no chunk of a stream has said."""

    engine: Engine
    journal: Journal
    until_accepting: UntilAccepting
    partial_every: int
    tracing: Tracing = NO_TRACING
    records: Recorded = RECORDED


@dataclass(frozen=True)
class AnswerContext:
    """One try of one answer: its session, its names, and the way of its tokens from the engine.

        engine ─► resumed after aborts ─► read, chunks ─► journal (partial answer) ─► shown
                                                  └─ end ─► journal (whole) ─► captured, released

    `call_id` and `created` (Unix seconds) come from the partial answer where there is one, so that all tries say the same.
    `partial`: None where no other server could be asked for the answer. `span`: the try's tracing span. `began_at`: of the
    try, Unix seconds.
    """

    deps: AnswerDeps
    session: Session
    answer: Answer
    request_key: RequestKey
    call_id: str
    created: int
    partial: PartialAnswer | None
    span: Span
    began_at: float = field(default_factory=time.time)

    def generate(self, request: GenerationRequest, prompt: int = 0) -> AsyncGenerator[GenerationDelta, None]:
        """Deltas of prompt number `prompt`. A chunk that is made of them is for `show`."""
        deps, partial = self.deps, self.partial
        trains = self.session.terms.purpose == "train"
        kept = trains and deps.records.masks and request.sampling.only_cuts
        request = replace(request, background=not trains, kept=kept, experts=trains and deps.records.experts)
        if partial is None:
            return resume(deps.engine, request, deps.until_accepting)
        streamed = request.stream
        if not streamed and request.sampling.max_tokens > deps.partial_every:
            request = replace(request, stream=True, delta_every=deps.partial_every)

        def keep(delta: GenerationDelta) -> Awaitable[None] | None:
            if not streamed and delta.finish_reason is not None:
                return None  # journaled with the whole answer, a moment later
            partial.note(prompt, delta)
            # A stream's are written with the chunk that they are in.
            return partial.write() if not streamed or partial.unwritten_tokens >= deps.partial_every else None

        return resume(deps.engine, request, deps.until_accepting, partial.replay(prompt, request), keep)

    def show(self, chunk: bytes) -> None:
        """Send a chunk once what it was made of is in the journal. Where that fails, the journal ends the answer."""
        written = None if self.partial is None else self.partial.write()
        if written is None:
            self.answer.put(chunk)
        else:
            self.answer.put_once_written(chunk, written)

    def tool_call_ids(self) -> Callable[[], Callable[[], str]]:
        """For each sample's reader, a maker of ids: the same in every try."""
        samples = itertools.count()

        def of_sample() -> Callable[[], str]:
            sample, calls = next(samples), itertools.count()

            def new() -> str:
                named = f"{self.call_id}/{sample}/{next(calls)}".encode()
                return f"call_{blake2b(named).hexdigest()[:_DIGITS]}"

            return new

        return of_sample

    async def settle(
        self,
        nodes: list[NodeRecord],
        sampling: SamplingParams,
        finish_reason: FinishReason | None,
        *,
        digests: bytes = b"",
        tools: bytes = b"",
    ) -> list[Node]:
        """Journal the answer, capture it, release its last chunks. Raises as `Journal.append` does."""
        request_key, session = self.request_key, self.session
        if self.span.context:
            note_sampled(self.span, [node.spans for node in nodes], session=session.session_id, answer=self.call_id)
        record = Answered(
            session_id=session.session_id,
            call_id=self.call_id,
            nodes=nodes,
            sampling=sampling,
            finish_reason=finish_reason or "stop",
            request_key=request_key,
            digests=digests,
            tools=tools,
            times=(self.began_at, time.time()),
        )
        kept = None
        if request_key.call is not None or request_key.key is not None:
            whole = self.answer.bytes_to_come
            kept = (self.call_id, whole) if len(whole) <= _KEPT_BYTES else None
        captured = await self.deps.journal.append(
            session.group_id,
            record,
            lambda: self._capture(record),
            partial=None if self.partial is None else self.partial.key,
            answer=kept,
            call=request_key.call,
        )
        self.answer.release()
        return captured

    def _capture(self, record: Answered) -> list[Node]:
        """Also where nobody waits for it any more: what the journal holds is captured."""
        nodes, memory = apply_answer(self.session, record), self.session.memory
        if record.request_key.call is not None and self.answer.call is not None:
            memory.rename(record.request_key.call, self.answer.call)
        memory.unseen.update(nodes)
        self.answer.when_delivered(lambda: memory.unseen.difference_update(nodes))
        return nodes


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt and what it extends: the path of the captured node `parent`, or nothing, for `reason`."""

    token_ids: list[int]
    parent: Node | None
    reason: BreakReason | None

    @property
    def addition(self) -> list[int]:
        return self.token_ids if self.parent is None else self.token_ids[self.parent.end :]


Produce = Callable[[AnswerContext], Awaitable[None]]


class AnswerService:
    """Starts answers in sessions and ends those that make no progress. `on_crash` is called when the engine crashed."""

    def __init__(self, deps: AnswerDeps, on_crash: Callable[[RollmeshError], None]) -> None:
        self._deps = deps
        self._engine = deps.engine
        self._on_crash = on_crash

    async def ask(self, session: Session, request_key: RequestKey, call_id: str, produce: Produce) -> Answer:
        """The answer to a call: one that is there already, if the call is a retry, else a new one named `call_id`.

        Raises SessionConcludedError or SessionExpiredError for a session that takes no calls, KeyReusedError, and
        NotReadyError where the partial answer of another server cannot be read.
        """
        known = await self._read_partial(session, request_key)
        session.check_open()
        repeated = session.memory.answers.repeated(request_key)
        if repeated is not None:
            await self._give_again(session, repeated, request_key)
            return repeated
        session.memory.sampled_anew(request_key.call)
        head, partial = PartialHead(call_id, int(time.time())), None
        if request_key.call is not None:
            journal = self._deps.journal
            if known:
                head = known[0] if isinstance(known[0], PartialHead) else head
            parts = [part for part in known if isinstance(part, PartialPart)]
            partial = PartialAnswer(
                journal, session.group_id, journal.partial_key(session.session_id, request_key.call), head, parts
            )

        async def make(answer: Answer) -> None:
            with generating(self._deps.tracing, session.terms.trace) as span:
                made = AnswerContext(
                    self._deps, session, answer, request_key, head.call_id, head.created, partial, span
                )
                await self._make(session, lambda: produce(made))

        return session.memory.answers.start(request_key, make)

    async def _give_again(self, session: Session, answer: Answer, request_key: RequestKey) -> None:
        """What a gateway noted of earlier tries counts no more; what it will note, it notes by this call's name."""
        earlier = answer.call
        if earlier is not None and answer.ended:
            await self._deps.journal.give_again(session.group_id, earlier)
        if request_key.call is not None:
            answer.call = request_key.call
            if earlier is not None:
                session.memory.rename(earlier, request_key.call)

    async def _read_partial(self, session: Session, request_key: RequestKey) -> list[PartialHead | PartialPart]:
        """What another server has sampled of this call; nothing for a session that was always here."""
        if request_key.call is None or not session.taken_over or session.memory.answers.knows(request_key):
            return []
        journal = self._deps.journal
        try:
            return await journal.read_partial(journal.partial_key(session.session_id, request_key.call))
        except RedisError as error:
            raise NotReadyError(
                f"a partial answer cannot be read: Redis failed ({error})", "send the call again"
            ) from error

    async def _make(self, session: Session, produce: Callable[[], Awaitable[None]]) -> None:
        left = session.seconds_left()
        limit = asyncio.timeout(left if left < float("inf") else None)
        try:
            with session.calling():
                async with limit:
                    await produce()
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = f"the deadline of session {session.session_id} passed after {session.terms.deadline_s:g} s"
            raise DeadlineError(what, "open sessions with a longer deadline_s") from error
        except EngineCrashedError as error:
            self._on_crash(error)
            raise

    async def watch(self, registry: GroupRegistry, patience_s: float) -> None:
        """End all calls when the engine, not paused, generates nothing for `patience_s` seconds; until cancelled."""
        while True:
            progress = Progress(self._engine)
            calling = [one for group in registry.all_open() for one in group.live if one.calls_in_flight]
            await asyncio.sleep(patience_s)
            if not calling:
                continue
            try:
                progress.check()
            except DeadlineError as error:
                for session in calling:
                    session.memory.answers.cancel_all(error)


def new_call_id(kind: str) -> str:
    """An answer's id, `chatcmpl-…` or `cmpl-…`: rewards name it."""
    return f"{kind}-{secrets.token_hex(12)}"


def fit(
    session: Session, sampling: SamplingParams, contexts: Sequence[Context], n: int, longest: int
) -> SamplingParams:
    """The same sampling, cut to what the model and the session's budget leave for `n` answers to each context.

    Raises ContextLengthError or BudgetSpentError where nothing is left.
    """
    prompt = max(len(context.token_ids) for context in contexts)
    if not all(context.token_ids for context in contexts):
        raise UsageError("the prompt is empty", "give at least one token")
    if prompt >= longest:
        raise ContextLengthError(prompt, longest)
    room = longest - prompt
    left = session.tokens_left()
    if left is not None:
        answers = n * len(contexts)
        if left < answers:
            raise BudgetSpentError(session.terms.max_tokens or 0)
        room = min(room, left // answers)
    return within(sampling, room)


def why_no_prefix(session: Session, prompt: Sequence[int]) -> BreakReason | None:
    """Why a prompt of tokens extends nothing captured: it begins as something captured does, or is another conversation."""
    if not session.capture.roots:
        return None
    shared = any(root.prompt[:1].tolist() == list(prompt[:1]) for root in session.capture.roots)
    return "compaction" if shared else "branch"


def written(context: Context, samples: Sequence[Sample[Piece]]) -> list[NodeRecord]:
    """Journal records of whole samples."""
    return [
        msgspec.structs.replace(
            node_record(
                context.parent,
                context.addition,
                sample.token_ids,
                sample.logprobs,
                sample.versions,
                sample.kept,
                sample.experts,
            ),
            reason=context.reason,
        )
        for sample in samples
    ]


SPAN_NAME = "rollout.generate"


def generating(tracing: Tracing, trace: str) -> AbstractContextManager[Span]:
    """The tracing span of generating tokens: a child of the request's, or of the session's where the request has none.

    `trace`: the context that the session was opened in.
    """
    return tracing.span(SPAN_NAME, parent=tracing.current() or trace)


def note_sampled(span: Span, samples: Sequence[Sequence[VersionSpan]], **names: str) -> None:
    """Tag the span with token counts and policy versions. `samples`: version spans of each. `names`: session, group …"""
    spans = [each for sample in samples for each in sample]
    span.note(**names, samples=len(samples), tokens=sum(each.length for each in spans))
    if spans:
        versions = [each.version for each in spans]
        span.note(version=max(versions), oldest_version=min(versions))
