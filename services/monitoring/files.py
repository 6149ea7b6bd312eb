"""Which files monitoring is made of."""

from __future__ import annotations

from services.monitoring.alerts import alert_rules, operator_rules
from services.monitoring.dashboard import dashboard


def monitoring_files() -> dict[str, str]:
    """Path below a folder → content."""
    return {
        "prometheus/alerts.yaml": alert_rules(),
        "kubernetes/components/prometheus-operator/alerts.yaml": operator_rules(),
        "grafana/rollmesh.json": dashboard(),
    }
