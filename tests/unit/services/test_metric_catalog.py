"""One naming scheme, and figures that are told as it says."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.observability import catalog as metric_catalog
from services.observability.catalog import CATALOG, Metric
from services.observability.metrics import Metrics, Reading

ROOMS = "service|rollout|gateway|bus|rewards|trainer"
UNITS = (
    "seconds|bytes|ratio|version|info|tokens|samples|requests|engines|updates|groups|sessions|servers|calls|tries|"
    "versions|components|steps|trajectories|reasons|units"
)


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_every_name_is_of_the_scheme(metric: Metric) -> None:
    assert re.fullmatch(rf"rollmesh_({ROOMS})_([a-z]+_)+?({UNITS})(_total)?", metric.name) or re.fullmatch(
        rf"rollmesh_({ROOMS})_({UNITS})(_total)?", metric.name
    )
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert (metric.buckets != ()) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(metric.buckets)
    assert metric.help


def test_no_name_is_given_twice() -> None:
    assert len({metric.name for metric in CATALOG}) == len(CATALOG) > 40


def test_figures_are_told_under_their_names_with_their_labels() -> None:
    metrics = Metrics()
    given = metrics.counter(metric_catalog.REWARDS_GIVEN)
    took = metrics.histogram(metric_catalog.BUS_STAGE)
    metrics.read(
        lambda: [
            Reading(metric_catalog.GATEWAY_IN_FLIGHT, 2, ("s0",)),
            Reading(metric_catalog.GATEWAY_IN_FLIGHT, 3, ("s1",)),
            Reading(metric_catalog.GATEWAY_RESENT, 5, ("s1",)),
        ]
    )
    given.inc()
    took.observe(0.3)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    samples = {
        (sample.name, *sample.labels.values()): sample.value for each in families.values() for sample in each.samples
    }
    assert samples["rollmesh_rewards_given_samples_total",] == 1
    assert samples["rollmesh_gateway_in_flight_calls", "s1"] == 3
    assert samples["rollmesh_gateway_failed_tries_total", "s1"] == 5
    assert samples["rollmesh_bus_stage_seconds_bucket", "0.25"] == 0
    assert samples["rollmesh_bus_stage_seconds_bucket", "0.5"] == 1
    assert families["rollmesh_bus_stage_seconds"].documentation == metric_catalog.BUS_STAGE.help
    assert ("process_resident_memory_bytes",) in samples


def test_figures_are_read_anew_at_each_scrape() -> None:
    metrics, values = Metrics(), iter([1.0, 2.0])
    metrics.read(lambda: [Reading(metric_catalog.BUS_LATEST, next(values))])
    assert b"rollmesh_bus_latest_version 1.0" in metrics.render()
    assert b"rollmesh_bus_latest_version 2.0" in metrics.render()
