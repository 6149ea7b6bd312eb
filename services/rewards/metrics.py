"""The service's figures, for Prometheus: rewards given, and every component without a value, by cause."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from services.policies.reward_formula import Composed, NotComposed, RewardFailure

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class RewardMetrics:
    """One service's figures, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._given = Counter("rollmesh_rewards_given", "Samples that got a reward", registry=self._registry)
        self._failed = Counter(
            "rollmesh_rewards_failed", "Samples that got none", ["component", "cause"], registry=self._registry
        )
        self._substituted = Counter(
            "rollmesh_rewards_substituted",
            "Components whose value was replaced",
            ["component", "cause"],
            registry=self._registry,
        )
        self._refused = Counter("rollmesh_rewards_refused", "Calls answered 429", registry=self._registry)
        self._seconds = Histogram(
            "rollmesh_rewards_component_seconds",
            "From a sample's coming to its component's end",
            ["component"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batches = Histogram(
            "rollmesh_rewards_batch_samples",
            "Samples in a call to a reward model",
            ["component"],
            buckets=_SIZES,
            registry=self._registry,
        )

    def count(self, judged: Composed | NotComposed) -> None:
        """A sample was judged."""
        if isinstance(judged, NotComposed):
            self._failed.labels(judged.component, judged.failure.cause).inc()
            return
        self._given.inc()
        self._count_substituted(judged.substituted)

    def _count_substituted(self, substituted: Mapping[str, RewardFailure]) -> None:
        for component, cause in substituted.items():
            self._substituted.labels(component, cause).inc()

    def refused(self) -> None:
        """A call was answered 429."""
        self._refused.inc()

    def component_took(self, component: str, seconds: float) -> None:
        self._seconds.labels(component).observe(seconds)

    def batch_sent(self, component: str, samples: int) -> None:
        self._batches.labels(component).observe(samples)

    def render(self) -> bytes:
        """In Prometheus's text format, as `CONTENT_TYPE`."""
        return generate_latest(self._registry)
