"""One answer in the making: what every try of it has in common, and the way of its tokens from the engine.

    engine ─► carried on through interruptions ─► (draft) ─► read, chunks ─► written down ─► applied, released

`call_id` and `created` come from the draft where there is one, so that all tries say the same.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b

from rollout_server.answers import Answer
from rollout_server.capture import Node
from rollout_server.carrying_on import UntilClear, carry_on
from rollout_server.drafts import Draft
from rollout_server.engines.base import Engine, FinishReason, GenerationDelta, GenerationRequest
from rollout_server.generation_spans import note_drawn
from rollout_server.journal import Journal
from rollout_server.journal_records import Answered, NodeRecord
from rollout_server.journal_replay import apply_answer
from rollout_server.retries import Marks
from rollout_server.sessions import Session
from services.tracing import NO_TRACING, Span, Tracing
from services.wire.sampling import SamplingParams

_KEPT_BYTES = 1 << 20
_DIGITS = 24


@dataclass(frozen=True)
class Means:
    """What answers are made with. `draft_every`: tokens after which one that is not streamed is written down."""

    engine: Engine
    journal: Journal
    until_clear: UntilClear
    draft_every: int
    tracing: Tracing = NO_TRACING


@dataclass(frozen=True)
class Making:
    """`created`: Unix seconds. `draft`: None where nobody could ask another server for this answer. `span`: of the try."""

    means: Means
    session: Session
    answer: Answer
    marks: Marks
    call_id: str
    created: int
    draft: Draft | None
    span: Span

    def draw(self, request: GenerationRequest, prompt: int = 0) -> AsyncGenerator[GenerationDelta, None]:
        """Deltas of prompt number `prompt`. None is given out before it is written down, if it is to be."""
        means, draft = self.means, self.draft
        if draft is None:
            return carry_on(means.engine, request, means.until_clear)
        streamed = request.stream
        if not streamed and request.sampling.max_tokens > means.draft_every:
            request = replace(request, stream=True, delta_every=means.draft_every)

        async def keep(delta: GenerationDelta) -> None:
            # What ends a call that is not streamed is written down with the whole answer, a moment later.
            if streamed or delta.finish_reason is None:
                await draft.add(prompt, delta)

        return carry_on(means.engine, request, means.until_clear, draft.replay(prompt, request), keep)

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
        """Write the answer down, capture it, and let its end be heard. Raises as `Journal.append` does."""
        marks, session = self.marks, self.session
        if self.span.context:
            note_drawn(self.span, [node.spans for node in nodes], session=session.session_id, answer=self.call_id)
        record = Answered(
            session_id=session.session_id,
            call_id=self.call_id,
            nodes=nodes,
            sampling=sampling,
            finish_reason=finish_reason or "stop",
            marks=marks,
            digests=digests,
            tools=tools,
        )
        kept = None
        if marks.call is not None or marks.key is not None:
            whole = self.answer.bytes_to_come
            kept = (self.call_id, whole) if len(whole) <= _KEPT_BYTES else None
        captured = await self.means.journal.append(
            session.group_id,
            record,
            lambda: apply_answer(session, record),
            draft=None if self.draft is None else self.draft.key,
            answer=kept,
        )
        self.answer.release()
        return captured
