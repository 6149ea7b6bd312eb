"""Grafana dashboard of a mesh: the trainer first, then what feeds it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from services.observability import catalog
from services.observability.queries import idle_share, over_k_share, quantile, rate

WIDTH, HEIGHT, COLUMNS = 8, 7, 3


@dataclass(frozen=True)
class Panel:
    """One graph. `queries`: PromQL → legend. `unit`: Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


PANELS = (
    Panel("Trainer idle", "percentunit", ((idle_share("1m"), "idle"),)),
    Panel("Trainer waits now", "s", ((catalog.TRAINER_WAITING.name, "waiting"),)),
    Panel("Training thread", "percentunit", ((rate(catalog.TRAINER_SECONDS, "1m", "activity"), "{{activity}}"),)),
    Panel(
        "Success and reward",
        "none",
        ((catalog.TRAINER_SUCCESS.name, "success"), (catalog.TRAINER_REWARD.name, "reward")),
    ),
    Panel("Success by task", "none", ((catalog.TRAINER_TASK_SUCCESS.name, "{{task}}"),)),
    Panel(
        "Staleness",
        "none",
        ((catalog.TRAINER_STALENESS.name, "mean"), (catalog.TRAINER_STALEST.name, "largest")),
    ),
    Panel("Tokens by staleness", "cps", ((rate(catalog.TRAINER_TOKENS, "1m", "staleness"), "{{staleness}}"),)),
    Panel("Tokens over K", "percentunit", ((over_k_share("5m"), "over K"),)),
    Panel("Effective samples", "percentunit", ((catalog.TRAINER_ESS.name, "effective"),)),
    Panel("Trajectories dropped", "cps", ((rate(catalog.TRAINER_DROPPED, "5m", "cause"), "{{cause}}"),)),
    Panel("Tokens sampled", "cps", ((rate(catalog.ROLLOUT_SAMPLED, "1m", "instance"), "{{instance}}"),)),
    Panel(
        "Samples",
        "none",
        (
            (catalog.ROLLOUT_RUNNING.name, "running {{instance}}"),
            (catalog.ROLLOUT_WAITING.name, "waiting {{instance}}"),
        ),
    ),
    Panel(
        "Groups",
        "none",
        ((catalog.ROLLOUT_GROUPS.name, "open {{instance}}"), (catalog.ROLLOUT_ADMISSION.name, "asking {{instance}}")),
    ),
    Panel(
        "Versions",
        "none",
        ((catalog.BUS_LATEST.name, "latest"), (catalog.BUS_SERVED.name, "{{engine}}")),
    ),
    Panel(
        "Updates, 95th percentile",
        "s",
        (
            (quantile(catalog.BUS_STAGE, 0.95, "5m"), "stage"),
            (quantile(catalog.BUS_FLIP, 0.95, "5m"), "flip"),
            (quantile(catalog.BUS_COMMIT, 0.95, "5m"), "announced to committed"),
        ),
    ),
    Panel("Calls to engines that failed", "cps", ((rate(catalog.BUS_FAILED, "5m", "phase"), "{{phase}}"),)),
    Panel("Calls in flight", "none", ((catalog.GATEWAY_IN_FLIGHT.name, "{{server}}"),)),
    Panel("Tries that failed", "cps", ((rate(catalog.GATEWAY_RESENT, "5m", "server"), "{{server}}"),)),
    Panel("Samples without reward", "cps", ((rate(catalog.REWARDS_FAILED, "5m", "component", "cause"), "{{cause}}"),)),
)


def dashboard() -> str:
    """Grafana's JSON, to be provisioned or imported; it asks for the data source."""
    panels = [_panel(index, panel) for index, panel in enumerate(PANELS)]
    made = {
        "uid": "rollmesh",
        "title": "rollmesh",
        "description": "Made by `rollmesh monitoring`: change services/observability/dashboard.py, not this file.",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def _panel(index: int, panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": source}
        for place, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": index % COLUMNS * WIDTH, "y": index // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }
