"""A draft: an answer as far as it is drawn, written down before its chunks are sent, so that another server can go on.

    engine ─► delta ─► journal ─► chunk ─► agent           the server dies here: no agent knows more than the journal
    another server:  parts of the draft, in their order, through the same code ─► the same chunks, byte for byte ─► engine

A part belongs to one of the call's prompts. Parts are replayed in the order in which they were written, also where the
prompts are drawn at once, for the chunks of all are one stream.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence

from rollout_server.engines.base import GenerationDelta, GenerationRequest
from rollout_server.journal import Journal
from rollout_server.journal_records import DraftHead, DraftPart


class Draft:
    """The draft of one call in a session of group `group_id`, under `key`. `known`: what an earlier try wrote."""

    def __init__(self, journal: Journal, group_id: str, key: str, head: DraftHead, known: Sequence[DraftPart]) -> None:
        self.key = key
        self.head = head
        self._journal = journal
        self._group_id = group_id
        self._known = known
        self._written = len(known)
        self._replayed = 0
        self._turn = asyncio.Condition()
        self._new = not known

    async def add(self, prompt: int, delta: GenerationDelta) -> None:
        """Write a delta of this prompt down. Raises as `Journal.append` does."""
        if self._new:
            self._new = False
            await self._journal.add_draft(self._group_id, self.key, self.head)
        self._written += 1
        part = DraftPart(
            number=self._written,
            prompt=prompt,
            index=delta.index,
            tokens=array("i", delta.token_ids).tobytes(),
            logprobs=array("d", delta.logprobs).tobytes(),
            spans=delta.versions,
            finish_reason=delta.finish_reason,
            top_logprobs=delta.top_logprobs,
        )
        await self._journal.add_draft(self._group_id, self.key, part)

    async def replay(self, prompt: int, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of this prompt that are written down, each when it is its turn among those of all prompts."""
        for place, part in enumerate(self._known):
            if part.prompt != prompt:
                continue
            async with self._turn:
                await self._turn.wait_for(lambda place=place: self._replayed >= place)  # type: ignore[misc]
            try:
                yield _delta(part, request.request_id)
            finally:
                async with self._turn:
                    self._replayed = place + 1
                    self._turn.notify_all()


def _delta(part: DraftPart, request_id: str) -> GenerationDelta:
    tokens, logprobs = array("i"), array("d")
    tokens.frombytes(part.tokens)
    logprobs.frombytes(part.logprobs)
    top = part.top_logprobs
    return GenerationDelta(
        request_id, part.index, tokens.tolist(), logprobs.tolist(), part.spans, part.finish_reason, top
    )
