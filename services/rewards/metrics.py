"""Metrics of the reward service: rewards given, and every component without a value, by cause."""

from __future__ import annotations

from services.observability import catalog
from services.observability.metrics import Metrics
from services.policies.rewards import Composed, NotComposed


class RewardMetrics:
    """Counts what the service did."""

    def __init__(self, metrics: Metrics) -> None:
        self._given = metrics.counter(catalog.REWARDS_GIVEN)
        self._failed = metrics.counter(catalog.REWARDS_FAILED)
        self._substituted = metrics.counter(catalog.REWARDS_SUBSTITUTED)
        self._refused = metrics.counter(catalog.REWARDS_REFUSED)
        self._seconds = metrics.histogram(catalog.REWARDS_SECONDS)
        self._batches = metrics.histogram(catalog.REWARDS_BATCH)

    def count(self, judged: Composed | NotComposed) -> None:
        """A sample was judged."""
        if isinstance(judged, NotComposed):
            self._failed.labels(judged.component, judged.failure.cause).inc()
            return
        self._given.inc()
        for component, cause in judged.substituted.items():
            self._substituted.labels(component, cause).inc()

    def refused(self) -> None:
        """A call was answered 429."""
        self._refused.inc()

    def component_took(self, component: str, seconds: float) -> None:
        self._seconds.labels(component).observe(seconds)

    def batch_sent(self, component: str, samples: int) -> None:
        self._batches.labels(component).observe(samples)
