"""Prometheus alert rules of a mesh, in PromQL over the metric catalogue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from textwrap import indent
from typing import Literal

from services.observability import catalog
from services.observability.queries import SCRAPED, idle_share, over_k_share, ratio
from services.policies.diagnosis.finding import RUNBOOK

HEADER = "# Made by `rollmesh monitoring`: change services/observability/alerts.py, not this file.\n"


@dataclass(frozen=True)
class Alert:
    """`query` has held for `lasts`. `summary`: one line, with Prometheus's templates; `remedy`: what to do."""

    name: str
    query: str
    lasts: str
    severity: Literal["page", "ticket"]
    summary: str
    remedy: str


_STATUS = "rollmesh status names the server and the groups"

ALERTS = (
    Alert(
        "RollmeshServiceDown",
        f"up{SCRAPED} == 0",
        "1m",
        "page",
        "{{ $labels.instance }} does not answer Prometheus",
        _STATUS,
    ),
    Alert(
        "RollmeshServiceNotReady",
        f"{catalog.SERVICE_NOT_READY.name} > 0",
        "2m",
        "page",
        "{{ $labels.instance }} is not ready",
        "GET /readyz there lists the reasons",
    ),
    Alert(
        "RollmeshTrainerWaits",
        f"{catalog.TRAINER_WAITING.name} > 30",
        "30s",
        "page",
        "The trainer waits for {{ $value | humanizeDuration }}",
        _STATUS,
    ),
    Alert(
        "RollmeshTrainerIdle",
        f"{idle_share('5m')} > 0.5",
        "10m",
        "ticket",
        "The trainer is idle for {{ $value | humanizePercentage }} of its time",
        "more rollout servers, or a larger K",
    ),
    Alert(
        "RollmeshTokensOverK",
        f"{over_k_share('10m')} > 0.1",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of the tokens are over K and not trained",
        "see whether updates reach every engine, and how long episodes take",
    ),
    Alert(
        "RollmeshFewEffectiveSamples",
        f"{catalog.TRAINER_ESS.name} < 0.3",
        "10m",
        "ticket",
        "Of the last step's tokens {{ $value | humanizePercentage }} count",
        "a smaller K, or another correction (docs/algorithms.md)",
    ),
    Alert(
        "RollmeshAccountWrong",
        f"increase({catalog.TRAINER_CORRECTED.name}[10m]) > 0",
        "0s",
        "ticket",
        "Redis has lost a part of the run",
        "see that its append-only file is whole and its disk sound; the trainer has corrected the account",
    ),
    Alert(
        "RollmeshEngineLost",
        f"increase({catalog.BUS_LOST.name}[5m]) > 0",
        "0s",
        "page",
        "The weight bus has lost an engine",
        _STATUS,
    ),
    Alert(
        "RollmeshUpdatesFail",
        f'increase({catalog.BUS_SETTLED.name}{{state="failed"}}[10m]) > 2',
        "0s",
        "page",
        "Weight updates fail",
        "rollmesh weights status says of which engine, and why",
    ),
    Alert(
        "RollmeshEngineBehind",
        f"scalar(max({catalog.BUS_LATEST.name})) - {catalog.BUS_SERVED.name} > 8",
        "2m",
        "ticket",
        "{{ $labels.engine }} is {{ $value }} versions behind",
        "rollmesh weights status says where its update stands",
    ),
    Alert(
        "RollmeshRewardsFail",
        f"{ratio(catalog.REWARDS_FAILED, catalog.REWARDS_GIVEN, '10m')} > 0.05",
        "10m",
        "ticket",
        "{{ $value | humanizePercentage }} of the samples get no reward",
        f"{catalog.REWARDS_FAILED.name} has the component and the cause",
    ),
)


def alert_rules(runbook: str = RUNBOOK) -> str:
    """Prometheus's rule file (YAML). `runbook`: where alerts link to, a page with a section for each."""
    return HEADER + _groups(runbook)


def operator_rules(runbook: str = RUNBOOK) -> str:
    """The same as an object of Prometheus's operator on Kubernetes."""
    head = "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata: {name: rollmesh}\nspec:\n"
    return HEADER + head + indent(_groups(runbook), "  ")


def _groups(runbook: str) -> str:
    """Texts are quoted as JSON quotes them, which YAML reads as they are."""
    lines = ["groups:\n", "  - name: rollmesh\n", "    rules:\n"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}\n",
            f"        expr: {json.dumps(alert.query)}\n",
            f"        for: {alert.lasts}\n",
            f"        labels: {{severity: {alert.severity}}}\n",
            "        annotations:\n",
            f"          summary: {json.dumps(alert.summary)}\n",
            f"          remedy: {json.dumps(alert.remedy)}\n",
            f"          runbook_url: {json.dumps(f'{runbook}#{alert.name.lower()}')}\n",
        ]
    return "".join(lines)
