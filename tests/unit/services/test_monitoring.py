"""Alerts and dashboard speak of figures that there are, and the files that ship are those that are made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.observability.alerts import ALERTS, alert_rules
from services.observability.catalog import CATALOG
from services.observability.cli import monitoring_files
from services.observability.dashboard import PANELS, dashboard
from tests.support.mesh_command import run_command

ROOT = Path(__file__).parents[3]
EXPORTED = {
    name for metric in CATALOG for name in ([f"{metric.name}_bucket"] if metric.kind == "histogram" else [metric.name])
}
LABELS = {label for metric in CATALOG for label in metric.labels} | {"instance", "le"}
QUERIES = [alert.query for alert in ALERTS] + [query for panel in PANELS for query, _ in panel.queries]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_only_what_is_exported(query: str) -> None:
    names = set(re.findall(r"rollmesh_[a-z_]+", query))
    assert names <= EXPORTED
    assert names or query.startswith("up{")
    assert set(label for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(", ")) <= LABELS
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("path", monitoring_files())
def test_the_files_that_ship_are_those_that_are_made(path: str) -> None:
    assert (ROOT / "deploy" / path).read_text(encoding="utf-8") == monitoring_files()[path], (
        "run rollmesh monitoring deploy"
    )


def test_rules_are_yaml_that_says_what_the_alerts_say() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(alert_rules())["groups"]
    assert [(rule["alert"], rule["expr"], rule["for"]) for rule in group["rules"]] == [
        (alert.name, alert.query, alert.lasts) for alert in ALERTS
    ]
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in group["rules"])


def test_panels_lie_beside_each_other() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in json.loads(dashboard())["panels"]]
    assert len(set(places)) == len(PANELS)


def test_the_command_writes_both(tmp_path: Path) -> None:
    done = run_command(["monitoring", str(tmp_path / "new")])
    assert done.code == 0, done.err
    assert {str(file.relative_to(tmp_path / "new")) for file in (tmp_path / "new").rglob("*.*")} == set(
        monitoring_files()
    )
