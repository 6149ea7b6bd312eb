"""`rollmesh monitoring`: write the alert rules and the dashboard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.observability.alerts import alert_rules, operator_rules
from services.observability.dashboard import dashboard
from services.policies.diagnosis.finding import RUNBOOK

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Write Prometheus's alert rules and Grafana's dashboard, made from the names that the services export: "
    "FOLDER/prometheus/alerts.yaml, the same for Prometheus's operator on Kubernetes, and FOLDER/grafana/rollmesh.json.\n\n"
    "Example: rollmesh monitoring deploy"
)
def monitoring(
    folder: Annotated[Path, typer.Argument(help="What is there is overwritten")],
    runbook_url: Annotated[
        str, typer.Option(metavar="URL", help="Where docs/runbook.md is read: alerts link to their sections of it")
    ] = RUNBOOK,
) -> None:
    from services.wire.errors import UsageError

    for path, content in monitoring_files(runbook_url).items():
        file = folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {file} ({error.strerror})", "name another folder") from error
        sys.stdout.write(f"{file}\n")


def monitoring_files(runbook: str = RUNBOOK) -> dict[str, str]:
    """The generated files: path below the folder → content."""
    return {
        "prometheus/alerts.yaml": alert_rules(runbook),
        "kubernetes/components/prometheus-operator/alerts.yaml": operator_rules(runbook),
        "grafana/rollmesh.json": dashboard(),
    }
