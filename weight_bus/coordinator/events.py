"""Event log of the weight bus, as resumable server-sent events, and its Prometheus metrics.

    add ──► | 7f3a-41 | 7f3a-42 | 7f3a-43 |   the oldest fall out
                 ▲ Last-Event-ID                follow ──► 42, 43, then each new one as it comes

An id is the bus process's random id and a number: one of an earlier process, or one that fell out, resumes from the
oldest event.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from services.observability import catalog
from services.observability.metrics import Metrics, Reading
from services.policies.fleet.update import Phase
from services.wire.weights_api import SETTLED, EngineState, EventKind, UpdateState, WeightEvent

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


@dataclass(frozen=True)
class BusState:
    """State of the bus for metrics. `latest`: what joining engines are brought to. `served`: engine → version.

    `progress`: where each live engine is in the newest update.
    """

    latest: int | None
    served: Mapping[str, int]
    progress: Iterable[EngineState]


class BusMetrics:
    """Prometheus metrics of the bus; `state` is called at each scrape."""

    def __init__(self, metrics: Metrics, state: Callable[[], BusState]) -> None:
        self._state = state
        self._announced = metrics.counter(catalog.BUS_ANNOUNCED)
        self._settled = metrics.counter(catalog.BUS_SETTLED)
        self._failed = metrics.counter(catalog.BUS_FAILED)
        self._lost = metrics.counter(catalog.BUS_LOST)
        self._stage = metrics.histogram(catalog.BUS_STAGE)
        self._flip = metrics.histogram(catalog.BUS_FLIP)
        self._commit = metrics.histogram(catalog.BUS_COMMIT)
        self._read = metrics.counter(catalog.BUS_READ)
        # 0 from the start: Prometheus sees no increase of a series that appears with its first event.
        for settled in SETTLED:
            self._settled.labels(settled)
        for phase in get_args(Phase):
            self._failed.labels(phase)
        metrics.read(self._readings)

    def announced(self) -> None:
        self._announced.inc()

    def settled(self, state: UpdateState) -> None:
        self._settled.labels(state).inc()

    def committed(self, seconds: float) -> None:
        """Every engine serves a version, so long after it was announced."""
        self._commit.observe(seconds)

    def staged(self, seconds: float, bytes_read: int) -> None:
        self._stage.observe(seconds)
        self._read.inc(bytes_read)

    def flipped(self, seconds: float) -> None:
        self._flip.observe(seconds)

    def call_failed(self, phase: Phase) -> None:
        self._failed.labels(phase).inc()

    def engine_lost(self) -> None:
        """An engine's lease ran out."""
        self._lost.inc()

    def _readings(self) -> Iterator[Reading]:
        state = self._state()
        if state.latest is not None:
            yield Reading(catalog.BUS_LATEST, state.latest)
        for engine, version in state.served.items():
            yield Reading(catalog.BUS_SERVED, version, (engine,))
        states = Counter(state.progress)
        for name in get_args(EngineState):
            yield Reading(catalog.BUS_ENGINES, states[name], (name,))
