"""PromQL that alerts and dashboards share, over names of the catalogue."""

from __future__ import annotations

from services.observability import catalog
from services.observability.catalog import Metric

SCRAPED = '{job=~"rollmesh.*"}'
"""What Prometheus calls a mesh's services."""


def rate(metric: Metric, window: str, *by: str) -> str:
    """Growth a second, summed over all but the labels `by`."""
    kept = f" by ({', '.join(by)})" if by else ""
    return f"sum{kept} (rate({metric.name}[{window}]))"


def ratio(part: Metric, other: Metric, window: str) -> str:
    """`part` of `part` and `other`, by how they grow."""
    return f"{rate(part, window)} / ({rate(part, window)} + {rate(other, window)})"


def idle_share(window: str) -> str:
    """Of the training thread's time, what it waited for batches."""
    name = catalog.TRAINER_SECONDS.name
    return f'sum (rate({name}{{activity="wait"}}[{window}])) / sum (rate({name}[{window}]))'


def over_k_share(window: str) -> str:
    """Of the sampled tokens, what is over K and left out of the loss."""
    return ratio(catalog.TRAINER_MASKED, catalog.TRAINER_TOKENS, window)


def quantile(metric: Metric, of: float, window: str) -> str:
    """Of a histogram, in its own unit."""
    return f"histogram_quantile({of:g}, sum by (le) (rate({metric.name}_bucket[{window}])))"
