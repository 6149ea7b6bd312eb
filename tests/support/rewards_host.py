"""A reward service on a real socket inside the test's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from services.config.rewards import RewardSettings
from services.http.app import Stop
from services.rewards.app import make_rewards_app
from services.security.permissions import Keys
from tests.support.served_app import served
from tests.support.until import until


@asynccontextmanager
async def judging(
    *components: dict[str, Any], key: str | None = None, hidden: Sequence[Path] = (), **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service that is ready. `components`: as `[[rewards.components]]` has them. `hidden`: its keys."""
    stop = Stop()
    checked = RewardSettings(components=list(components), **settings)  # type: ignore[arg-type]
    app = make_rewards_app(checked, stop, keys=Keys(agent=key), hidden=hidden)
    async with served(app, stop) as url, httpx.AsyncClient(base_url=url, timeout=20.0) as http:

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await until(ready, 20.0)
        yield http


def figure(text: str, name: str, **labels: str) -> float:
    """One figure of `GET /metrics`; 0 for one that was never counted."""
    wanted = name + ("{" + ",".join(f'{key}="{labels[key]}"' for key in sorted(labels)) + "}" if labels else "")
    found = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return next((float(value) for key, _, value in found if key == wanted), 0.0)
