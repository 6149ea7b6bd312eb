"""Calls of agents: each an answer in a session, made once however often it is asked for, ended by whoever may end it.

HTTP call ──► a retry? ──► the answer that is there
                └─ no ──► task: render ─► draw ─► (heard) ─► captured ─► chunks
                             ends early: deadline, abort, expiry, nobody listens, the engine stands still
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from redis.exceptions import RedisError

from rollout_server.answers import Answer
from rollout_server.capture import Node
from rollout_server.carrying_on import Progress
from rollout_server.dialect.drawing import Piece, Sample
from rollout_server.dialect.making import Making, Means
from rollout_server.dialect.sampling_choice import BudgetSpentError, within
from rollout_server.drafts import Draft
from rollout_server.engines.errors import EngineCrashedError
from rollout_server.generation_spans import generating
from rollout_server.groups import GroupRegistry
from rollout_server.journal_records import DraftHead, DraftPart, NodeRecord
from rollout_server.journal_replay import node_record
from rollout_server.retries import Marks
from rollout_server.sessions import Session
from services.wire.errors import ContextLengthError, DeadlineError, NotReadyError, RollmeshError, UsageError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import BreakReason


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt and where it hangs: after `parent`'s path, or a root for `reason`."""

    token_ids: list[int]
    parent: Node | None
    reason: BreakReason | None

    @property
    def addition(self) -> list[int]:
        return self.token_ids if self.parent is None else self.token_ids[self.parent.end :]


Produce = Callable[[Making], Awaitable[None]]


class Caller:
    """Starts answers in sessions and watches over them. `on_crash` is told when the engine is gone for good."""

    def __init__(self, means: Means, on_crash: Callable[[RollmeshError], None]) -> None:
        self._means = means
        self._engine = means.engine
        self._on_crash = on_crash

    async def ask(self, session: Session, marks: Marks, call_id: str, produce: Produce) -> Answer:
        """The answer to a call: one that is there already, if the call is a retry, else a new one named `call_id`.

        Raises SessionConcludedError or SessionExpiredError for a session that takes no calls, KeyReusedError, and
        NotReadyError where the draft of another server cannot be read.
        """
        known = await self._read_draft(session, marks)
        session.check_open()
        repeated = session.memory.answers.repeated(marks)
        if repeated is not None:
            return repeated
        head, draft = DraftHead(call_id, int(time.time())), None
        if marks.call is not None:
            journal = self._means.journal
            if known:
                head = known[0] if isinstance(known[0], DraftHead) else head
            parts = [part for part in known if isinstance(part, DraftPart)]
            draft = Draft(journal, session.group_id, journal.draft_key(session.session_id, marks.call), head, parts)

        async def make(answer: Answer) -> None:
            with generating(self._means.tracing, session.terms.trace) as span:
                made = Making(self._means, session, answer, marks, head.call_id, head.created, draft, span)
                await self._make(session, lambda: produce(made))

        return session.memory.answers.start(marks, make)

    async def _read_draft(self, session: Session, marks: Marks) -> list[DraftHead | DraftPart]:
        """What another server has drawn of this call. A session that was always here needs no look."""
        if marks.call is None or not session.adopted or session.memory.answers.knows(marks):
            return []
        journal = self._means.journal
        try:
            return await journal.read_draft(journal.draft_key(session.session_id, marks.call))
        except RedisError as error:
            raise NotReadyError(f"a draft cannot be read: Redis failed ({error})", "send the call again") from error

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
        """End all calls when the engine, not paused, draws nothing for `patience_s` seconds; until cancelled."""
        while True:
            progress = Progress(self._engine)
            calling = [session for session in _live(registry) if session.calls_in_flight]
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
    """Whole samples as they are written down."""
    return [
        msgspec.structs.replace(
            node_record(context.parent, context.addition, sample.token_ids, sample.logprobs, sample.versions),
            reason=context.reason,
        )
        for sample in samples
    ]


def _live(registry: GroupRegistry) -> list[Session]:
    return [session for group in registry.all_open() for session in group.live]
