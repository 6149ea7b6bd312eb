"""What a dashboard is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from services.dashboard.open_runs import OpenRuns
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PUBLIC, Trust


@dataclass(frozen=True)
class DashboardPlan:
    """`keys`: those that callers show, and Redis's password. `trust`: which certificates of services it takes. `secure`: it
    is served over HTTPS."""

    runs: OpenRuns
    keys: Keys = NO_KEYS
    trust: Trust = PUBLIC
    secure: bool = False
