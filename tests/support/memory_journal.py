"""The journal without Redis: what was written, as bytes, in memory. For tests of what is written and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rollout_server.journal.records import (
    DraftHead,
    DraftPart,
    Record,
    decode_draft,
    decode_record,
    encode_record,
)

T = TypeVar("T")


class MemoryJournal:
    """What answers need of `rollout_server.journal.journal.Journal`, of one group."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.drafts: dict[str, list[bytes]] = {}
        self.answers: dict[str, bytes] = {}

    async def append(
        self,
        group_id: str,
        record: Record,
        then: Callable[[], T],
        *,
        draft: str | None = None,
        answer: tuple[str, bytes] | None = None,
    ) -> T:
        self.written.append(encode_record(record))
        if draft is not None:
            self.drafts.pop(draft, None)
        if answer is not None:
            self.answers[answer[0]] = answer[1]
        return then()

    async def add_draft(self, group_id: str, draft: str, part: DraftHead | DraftPart) -> None:
        self.drafts.setdefault(draft, []).append(encode_record(part))

    def draft_key(self, session_id: str, call: str) -> str:
        return f"{session_id}/{call}"

    async def read_draft(self, draft: str) -> list[DraftHead | DraftPart]:
        return [decode_draft(packed) for packed in self.drafts.get(draft, [])]

    async def kept_answers(self, group_id: str, names: Sequence[str]) -> list[bytes | None]:
        return [self.answers.get(name) for name in names]

    def records(self) -> list[Record]:
        return [decode_record(packed) for packed in self.written]
