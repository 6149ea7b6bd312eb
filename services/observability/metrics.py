"""Prometheus metrics of one process: counters changed by events, and readings taken at each scrape; never per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from services.observability.catalog import Metric

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class Reading:
    """A counter's or a gauge's value at this moment. `labels`: values, in the metric's order."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Readings = Callable[[], Iterable[Reading]]
"""Called at each scrape, on the thread that answers it: it must be quick, and wait for nobody."""


class Metrics:
    """The figures of one process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    def counter(self, metric: Metric) -> Counter:
        """To be raised where something happens. Raises ValueError for one that is there already."""
        return Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def histogram(self, metric: Metric) -> Histogram:
        """To observe values in. Raises ValueError for one that is there already."""
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry)

    def read(self, readings: Readings) -> None:
        """Ask `readings` at each scrape."""
        self._registry.register(_Reader(readings))

    def render(self) -> bytes:
        """In Prometheus's text format, as `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class _Reader(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for reading in self._readings():
            metric = reading.metric
            family = families.get(metric.name)
            if family is None:
                made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = families[metric.name] = made(metric.name, metric.help, labels=metric.labels)
            family.add_metric(reading.labels, reading.value)
        yield from families.values()
