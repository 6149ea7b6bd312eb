"""The runbook has a section for each alert and each finding, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.observability.alerts import ALERTS, alert_rules
from services.policies.diagnosis.finding import FINDING_IDS, RUNBOOK, error
from services.wire.errors import UsageError

ROOT = Path(__file__).parents[3]


def sections() -> list[str]:
    """The anchors of the sections of the runbook, which are not empty."""
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    found = re.findall(r"^### (\S+)\n\n(\S)", text, flags=re.MULTILINE)
    return [heading.lower() for heading, _ in found]


def test_each_alert_and_each_finding_has_its_section() -> None:
    assert sorted(sections()) == sorted([*(alert.name.lower() for alert in ALERTS), *FINDING_IDS])


def test_alerts_and_findings_link_to_it() -> None:
    linked = re.findall(r'runbook_url: "(\S+)#(\S+)"', alert_rules())
    assert [page for page, _ in linked] == [RUNBOOK] * len(ALERTS)
    assert {anchor for _, anchor in linked} <= set(sections())
    assert '"https://example.org/runbook#rollmeshtraineridle"' in alert_rules("https://example.org/runbook")
    assert error("disk", "", "", "").runbook == "docs/runbook.md#disk"


def test_links_within_it_lead_somewhere() -> None:
    text = (ROOT / RUNBOOK).read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(#([a-z-]+)\)", text)) <= set(sections())


def test_only_errors_refuse() -> None:
    from services.policies.diagnosis.finding import refuse, warning

    refuse([warning("nixl-slow", "slow", "seen", "do")])
    with pytest.raises(UsageError, match=r"full \(seen\): do") as refused:
        refuse([warning("nixl-slow", "slow", "seen", "do"), error("disk", "full", "seen", "do")])
    assert refused.value.finding == "disk"
