"""What happened on the bus, for those who watch: a bounded memory of events that a stream can be resumed from.

    add ──► | 7f3a-41 | 7f3a-42 | 7f3a-43 |   the oldest fall out
                 ▲ Last-Event-ID                follow ──► 42, 43, then each new one as it comes

An id is the bus's life and a number: one of an earlier life, or one that fell out, resumes from the oldest remembered.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator

from services.wire.weights_api import EventKind, WeightEvent

REMEMBERED = 4096


class EventLog:
    """Used on one event loop. `remembered`: how many events are kept."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._life = secrets.token_hex(4)
        self._events: deque[WeightEvent] = deque(maxlen=remembered)
        self._count = 0
        self._more = asyncio.Event()
        self._closed = False

    def add(
        self, kind: EventKind, *, version: int | None = None, engine_id: str | None = None, why: str | None = None
    ) -> None:
        self._count += 1
        name = f"{self._life}-{self._count}"
        self._events.append(
            WeightEvent(id=name, at=time.time(), kind=kind, version=version, engine_id=engine_id, why=why)
        )
        self._wake()

    def close(self) -> None:
        """End every stream: the service is ending."""
        self._closed = True
        self._wake()

    async def follow(self, last_id: str | None, idle_s: float) -> AsyncGenerator[WeightEvent | None, None]:
        """Events after `last_id` (None: all that are remembered), then new ones; None after every `idle_s` without any."""
        seen = self._place_of(last_id)
        while not self._closed:
            # Events are numbered without gaps, so what is new is the tail of the memory.
            behind = min(self._count - seen, len(self._events))
            seen = self._count
            for event in list(self._events)[len(self._events) - behind :]:
                yield event
            if seen < self._count:
                continue
            more = self._more
            try:
                async with asyncio.timeout(idle_s):
                    await more.wait()
            except TimeoutError:
                yield None

    def _place_of(self, last_id: str | None) -> int:
        life, _, number = (last_id or "").partition("-")
        return min(int(number), self._count) if life == self._life and number.isdigit() else 0

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


def encode_event(event: WeightEvent | None) -> bytes:
    """A server-sent event; a comment for None, which keeps the connection."""
    if event is None:
        return b": alive\n\n"
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json(exclude_none=True)}\n\n".encode()
