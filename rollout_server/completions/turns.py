"""Turns of the group API: siblings with the same context are one engine request; a call takes effect whole or not at all.

reserve sessions ─► encode ─► plan requests ─► engine, all awaited together ─► check ─► journal, apply every turn
                                                   │ client gone, engine error, no progress
                                                   └─► requests closed, no turn recorded, sessions free again
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions.base import RECORDED, Recorded, generating, note_sampled
from rollout_server.completions.resumable import UntilAccepting, resume
from rollout_server.completions.sampling import within
from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest, collect
from rollout_server.journal.journal import Journal
from rollout_server.journal.records import TurnRecord, TurnsAnswered
from rollout_server.journal.replay import apply_turns, node_record
from rollout_server.sessions.capture import CaptureError, check_sampled
from rollout_server.sessions.group import Group, sampling_of
from rollout_server.sessions.session import Session
from services.host.aio import NamedLocks
from services.observability.tracing import NO_TRACING, Tracing
from services.wire.errors import ContextLengthError, UsageError
from services.wire.rollout_api import TakeTurns, Turn, TurnsTaken, TurnTaken
from services.wire.sampling import SamplingParams

_KEPT_ANSWERS = 4


def _sampling_in(group: Group, session: Session, asked: SamplingParams) -> SamplingParams:
    """A session that was opened to be sampled greedily, other than its group, is; one with a seed of its own, by that."""
    own, siblings = session.terms.sampling, None if group.sampling is None else group.sampling.temperature
    if own.temperature == 0.0 and siblings != 0.0:
        asked = msgspec.structs.replace(asked, temperature=0.0)
    return asked if own.seed is None or own.seed == asked.seed else msgspec.structs.replace(asked, seed=own.seed)


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine request and the turns (positions in the call) that its samples belong to, in order."""

    request: GenerationRequest
    turns: list[int]


class TurnTaker:
    """Generates the policy's turns in sessions of a group."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        journal: Journal,
        until_accepting: UntilAccepting,
        tracing: Tracing = NO_TRACING,
        *,
        records: Recorded = RECORDED,
    ) -> None:
        self._records = records
        self._engine = engine
        self._renderer = renderer
        self._journal = journal
        self._until_accepting = until_accepting
        self._tracing = tracing
        self._names = NamedLocks()
        self._count = itertools.count()

    async def take(self, group: Group, call: TakeTurns, name: str | None = None) -> bytes:
        """Take all turns of `call`, or none; the answer, JSON of TurnsTaken, in the call's order.

        `name`: of the call; one that was answered gets the same answer. Raises as `Group.reserved` does, UsageError for a
        context that is empty or too long, CaptureError for an answer of the engine that contradicts itself, and as
        `Journal.append` does. Cancelling it records nothing unless it is being written down already.
        """
        if name is None:
            return await self._take(group, call, None)
        # The same call may come again while its first sending, whose client has gone, is being given up.
        async with self._names.hold(name):
            return await self._answered(group, name) or await self._take(group, call, name)

    async def _take(self, group: Group, call: TakeTurns, name: str | None) -> bytes:
        sampling = group.sampling if call.sampling is None else sampling_of(call.sampling)
        if sampling is None:
            raise UsageError(f"group {group.group_id} was opened without sampling", "give `sampling` with the turns")
        with group.reserved([turn.session_id for turn in call.turns]) as sessions:
            additions = await self._encode(call.turns)
            samplings = [_sampling_in(group, session, sampling) for session in sessions]
            plans = self._plan(group, sessions, additions, samplings)
            began_at = time.time()
            with generating(self._tracing, sessions[0].terms.trace) as span:
                sampled = await self._run_all(plans)
                if span.context:
                    note_sampled(span, [delta.versions for delta in sampled.values()], group=group.group_id)
            ordered = [sampled[position] for position in range(len(sessions))]
            for delta in ordered:
                check_sampled(delta.token_ids, delta.logprobs, delta.versions)
            taken = [self._answer(session, delta, call) for session, delta in zip(sessions, ordered, strict=True)]
            answer = msgspec.json.encode(TurnsTaken(results=taken))
            record = TurnsAnswered(
                call=name,
                sampling=sampling,
                turns=[
                    TurnRecord(
                        session.session_id,
                        node_record(
                            session.capture.tip,
                            addition,
                            delta.token_ids,
                            delta.logprobs,
                            delta.versions,
                            delta.kept,
                            delta.experts,
                        ),
                        delta.finish_reason or "stop",
                        None if own == sampling else own,
                    )
                    for session, addition, delta, own in zip(sessions, additions, ordered, samplings, strict=True)
                ],
                times=(began_at, time.time()),
            )
            kept = None if name is None else (name, answer)
            await self._journal.append(group.group_id, record, lambda: _capture(group, record), answer=kept, call=name)
            if name is not None:
                _remember(group, name, answer)
        return answer

    async def _answered(self, group: Group, name: str) -> bytes | None:
        if group.taken_over and name not in group.turns_answered:
            (kept,) = await self._journal.kept_answers(group.group_id, [name])
            if kept is not None:
                _remember(group, name, kept)
        answered = group.turns_answered.get(name)
        if answered is None:
            for session in group.sessions.values():
                session.memory.sampled_anew(name)
        else:
            await self._journal.give_again(group.group_id, name)
        return answered

    async def _encode(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Token ids that each turn adds. Siblings mostly say the same, so each text is encoded once."""
        encoded: dict[str, list[int]] = {}
        additions = []
        for turn in turns:
            if turn.text is None:
                additions.append(turn.token_ids or [])
                continue
            if turn.text not in encoded:
                encoded[turn.text] = await self._renderer.encode(turn.text)
            additions.append(encoded[turn.text])
        return additions

    def _plan(
        self,
        group: Group,
        sessions: Sequence[Session],
        additions: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
    ) -> list[Plan]:
        alike: dict[tuple[SamplingParams, tuple[int, ...]], list[int]] = {}
        for position, (session, addition, sampling) in enumerate(zip(sessions, additions, samplings, strict=True)):
            alike.setdefault((sampling, (*session.capture.context, *addition)), []).append(position)
        return [
            Plan(
                GenerationRequest(
                    request_id=f"{group.group_id}:{next(self._count)}",
                    prompt_token_ids=list(prompt),
                    sampling=self._fit(sampling, len(prompt)),
                    n=len(positions),
                    background=group.purpose == "evaluate",
                    kept=self._records.masks and group.purpose == "train" and sampling.only_cuts,
                    experts=self._records.experts and group.purpose == "train",
                ),
                positions,
            )
            for (sampling, prompt), positions in alike.items()
        ]

    def _fit(self, sampling: SamplingParams, prompt_length: int) -> SamplingParams:
        """Sampling that stays within the model's longest sequence."""
        if prompt_length == 0:
            raise UsageError("a session has no tokens to continue", "say something in its first turn")
        room = self._engine.max_model_len - prompt_length
        if room < 1:
            raise ContextLengthError(prompt_length, self._engine.max_model_len)
        return within(sampling, room)

    async def _run_all(self, plans: list[Plan]) -> dict[int, GenerationDelta]:
        if len(plans) == 1:
            return await self._run(plans[0])
        tasks = [asyncio.ensure_future(self._run(plan)) for plan in plans]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            unfinished = [task for task in tasks if not task.done()]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        return {position: delta for answer in answers for position, delta in answer.items()}

    async def _run(self, plan: Plan) -> dict[int, GenerationDelta]:
        async with aclosing(resume(self._engine, plan.request, self._until_accepting)) as deltas:
            samples = await collect(deltas)
        if [sample.index for sample in samples] != list(range(plan.request.n)):
            raise CaptureError(f"the engine answered {len(samples)} of {plan.request.n} samples")
        return dict(zip(plan.turns, samples, strict=True))

    def _answer(self, session: Session, delta: GenerationDelta, call: TakeTurns) -> TurnTaken:
        return TurnTaken(
            session_id=session.session_id,
            text=self._renderer.decode(delta.token_ids),
            token_ids=delta.token_ids if call.return_token_ids else None,
            finish_reason=delta.finish_reason or "stop",
            policy_version=max((span.version for span in delta.versions), default=self._engine.policy_version),
        )


def _capture(group: Group, record: TurnsAnswered) -> None:
    """Also where nobody waits for it any more: what the journal holds is captured."""
    for session, node in apply_turns(group, record):
        session.memory.unseen.add(node)


def delivered(group: Group, call: TakeTurns) -> None:
    """The client of `call`, which has been answered, got the turns."""
    for turn in call.turns:
        session = group.sessions.get(turn.session_id)
        if session is not None and session.capture.tip is not None:
            session.memory.unseen.discard(session.capture.tip)


def _remember(group: Group, name: str, answer: bytes) -> None:
    group.turns_answered[name] = answer
    while len(group.turns_answered) > _KEPT_ANSWERS:
        group.turns_answered.popitem(last=False)
