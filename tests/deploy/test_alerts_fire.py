"""Prometheus's own promtool reads the rules that ship, and says of each alert when it fires."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.observability import catalog
from services.observability.alerts import ALERTS
from services.observability.metrics import Metrics
from tests.deploy.alert_cases import CASES, AlertCase, Series
from tests.support.fetch_tools import find_tool
from weight_bus.coordinator.events import BusMetrics, BusState

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
BY_NAME = {alert.name: alert for alert in ALERTS}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = find_tool("promtool")
    if found is None:
        pytest.skip("no promtool: ./dev test fetches one where Debian's packages can be had")
    return found


def run(promtool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=120, check=False)


def judge(promtool: str, tests: list[dict[str, Any]], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """promtool's verdict on the rules that ship. JSON is YAML."""
    file = tmp_path / "alerts_test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}))
    return run(promtool, "test", "rules", str(file))


def fired(case: AlertCase) -> dict[str, Any]:
    alert = BY_NAME[case.alert]
    return {
        "exp_labels": {"severity": alert.severity, **case.labels},
        "exp_annotations": {
            "summary": case.summary,
            "remedy": alert.remedy,
            "runbook_url": f"docs/runbook.md#{alert.name.lower()}",
        },
    }


def told(case: AlertCase, series: Series, at: str, alerts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": case.alert, "exp_alerts": alerts}],
    }


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == [alert.name for alert in ALERTS]


def test_the_rules_are_prometheus_rules(promtool: str) -> None:
    checked = run(promtool, "check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_where_it_must_and_nowhere_else(case: AlertCase, promtool: str, tmp_path: Path) -> None:
    verdict = judge(
        promtool,
        [
            told(case, case.bad, case.not_yet, []),
            told(case, case.bad, case.fires_at, [fired(case)]),
            told(case, case.good, case.not_yet, []),
            told(case, case.good, case.fires_at, []),
        ],
        tmp_path,
    )
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_the_bus_tells_of_failures_from_zero_on() -> None:
    """Else the first ones would be no rise, and `RollmeshUpdatesFail` came late."""
    metrics = Metrics()
    BusMetrics(metrics, lambda: BusState(latest=None, served={}, progress=()))
    told = metrics.render().decode()
    assert f'{catalog.BUS_SETTLED.name}{{state="failed"}} 0.0' in told
    assert f'{catalog.BUS_FAILED.name}{{phase="stage"}} 0.0' in told


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_the_judge_tells_bad_from_good(case: AlertCase, promtool: str, tmp_path: Path) -> None:
    """With the two exchanged promtool must protest: a judge that lets all pass would prove nothing."""
    swapped = dataclasses.replace(case, bad=case.good, good=case.bad)
    for series, alerts in ((swapped.bad, [fired(case)]), (swapped.good, [])):
        verdict = judge(promtool, [told(case, series, case.fires_at, alerts)], tmp_path)
        assert verdict.returncode != 0, f"{case.alert}: {alerts or 'silence'} was taken for right"
