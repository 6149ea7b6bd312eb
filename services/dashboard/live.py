"""Looks at one run: what its services, its trainer and its files say now."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from services.dashboard.events import Look, Sections
from services.dashboard.open_runs import OpenRun


class RunLook:
    """See `services.dashboard.events.Look`."""

    pause_s = 1.5

    def __init__(self, run: OpenRun) -> None:
        self._run = run

    async def look(self) -> Sections:
        return {"live": msgspec.json.encode(self._run.redis_url is not None)}


@asynccontextmanager
async def looking(run: OpenRun) -> AsyncIterator[Look]:
    """A look at the run."""
    yield RunLook(run)
