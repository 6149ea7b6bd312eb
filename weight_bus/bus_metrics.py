"""The weight bus's figures: how updates end, what engines took for them, and where each engine is now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from services.observability import catalog
from services.observability.metrics import Metrics, Reading
from services.policies.fleet_update import Phase
from services.wire.weights_api import SETTLED, EngineState, UpdateState


@dataclass(frozen=True)
class BusState:
    """A moment of the bus. `latest`: what engines that join are brought to. `served`: engine → version.

    `progress`: where each live engine is in the newest update.
    """

    latest: int | None
    served: Mapping[str, int]
    progress: Iterable[EngineState]


class BusMetrics:
    """Counts what the coordinator sees; `state` is asked at each scrape."""

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
        # Told as 0 from the start: of a series that appears with its first event Prometheus sees no rise.
        for settled in SETTLED:
            self._settled.labels(settled)
        for phase in get_args(Phase):
            self._failed.labels(phase)
        metrics.read(self._readings)

    def announced(self) -> None:
        """A new version was announced."""
        self._announced.inc()

    def settled(self, state: UpdateState) -> None:
        """An update came to an end."""
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
