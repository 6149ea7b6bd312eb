"""Calls of agents: each an answer in a session, made once however often it is asked for, ended by whoever may end it.

HTTP call ──► a retry? ──► the answer that is there
                └─ no ──► task: render ─► draw ─► (heard) ─► captured ─► chunks
                             ends early: deadline, abort, expiry, nobody listens, the engine stands still
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollout_server.answers import Answer
from rollout_server.capture import Node
from rollout_server.dialect.drawing import Piece, Sample
from rollout_server.dialect.sampling_choice import BudgetSpentError, within
from rollout_server.engines.base import Engine
from rollout_server.engines.errors import EngineCrashedError
from rollout_server.groups import GroupRegistry
from rollout_server.retries import Marks
from rollout_server.sessions import Session
from rollout_server.turns import Progress
from services.wire.errors import ContextLengthError, DeadlineError, RollmeshError, UsageError
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


class Caller:
    """Starts answers in sessions and watches over them. `on_crash` is told when the engine is gone for good."""

    def __init__(self, engine: Engine, on_crash: Callable[[RollmeshError], None]) -> None:
        self._engine = engine
        self._on_crash = on_crash

    def ask(self, session: Session, marks: Marks, produce: Callable[[Answer], Awaitable[None]]) -> Answer:
        """The answer to a call: one that is there already, if the call is a retry, else a new one.

        Raises SessionConcludedError or SessionExpiredError for a session that takes no calls, KeyReusedError.
        """
        session.check_open()
        repeated = session.memory.answers.repeated(marks)
        if repeated is not None:
            return repeated
        return session.memory.answers.start(marks, lambda answer: self._make(session, answer, produce))

    async def _make(self, session: Session, answer: Answer, produce: Callable[[Answer], Awaitable[None]]) -> None:
        left = session.seconds_left()
        limit = asyncio.timeout(left if left < float("inf") else None)
        try:
            with session.calling():
                async with limit:
                    await produce(answer)
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


def record(
    session: Session, call_id: str, context: Context, samples: Sequence[Sample[Piece]], sampling: SamplingParams
) -> list[Node]:
    """Capture whole samples; returns a node for each."""
    nodes = [
        session.capture.record(
            context.parent,
            context.addition,
            sample.token_ids,
            sample.logprobs,
            sample.versions,
            sampling,
            context.reason,
        )
        for sample in samples
    ]
    session.memory.calls.setdefault(call_id, []).extend(nodes)
    session.finish_reason = samples[0].finish_reason or "stop"
    return nodes


def _live(registry: GroupRegistry) -> list[Session]:
    return [session for group in registry.all_open() for session in group.live]
