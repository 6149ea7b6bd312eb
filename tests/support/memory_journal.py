"""The journal without Redis: what was written, as bytes, in memory. For tests of what is written and replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TypeVar

from rollout_server.journal.records import (
    PartialHead,
    PartialPart,
    Record,
    decode_partial,
    decode_record,
    encode_record,
)

T = TypeVar("T")


class _Written(asyncio.Future[None]):
    """Who waits for it hears at once, and so before an `append` is done that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.set_result(None)

    def add_done_callback(
        self, then: Callable[[asyncio.Future[None]], object], *, context: Context | None = None
    ) -> None:
        then(self)


class MemoryJournal:
    """What answers need of `rollout_server.journal.journal.Journal`, of one group."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.partials: dict[str, list[bytes]] = {}
        self.answers: dict[str, bytes] = {}

    async def append(
        self,
        group_id: str,
        record: Record,
        then: Callable[[], T],
        *,
        partial: str | None = None,
        answer: tuple[str, bytes] | None = None,
        call: str | None = None,
    ) -> T:
        self.written.append(encode_record(record))
        if partial is not None:
            self.partials.pop(partial, None)
        if answer is not None:
            self.answers[answer[0]] = answer[1]
        return then()

    def add_partial(self, group_id: str, partial: str, *parts: PartialHead | PartialPart) -> asyncio.Future[None]:
        self.partials.setdefault(partial, []).extend(encode_record(part) for part in parts)
        return _Written()

    async def give_again(self, group_id: str, call: str) -> None:
        """Nothing was noted."""

    def partial_key(self, session_id: str, call: str) -> str:
        return f"{session_id}/{call}"

    async def read_partial(self, partial: str) -> list[PartialHead | PartialPart]:
        return [decode_partial(packed) for packed in self.partials.get(partial, [])]

    async def kept_answers(self, group_id: str, names: Sequence[str]) -> list[bytes | None]:
        return [self.answers.get(name) for name in names]

    def records(self) -> list[Record]:
        return [decode_record(packed) for packed in self.written]
