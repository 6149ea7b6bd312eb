"""Groups that were given up while their server was out of reach: aborted as soon as it, or another, can be reached.

The runner lives, so no lease ends them; until then they would keep their places in admission for their whole idle time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from clients.rollout.client import RolloutClient
from services.wire.errors import (
    ConcludedError,
    NotFoundError,
    RollmeshError,
    SessionConcludedError,
    SessionExpiredError,
)
from services.wire.rollout_api import GroupOpened

_AGAIN_S = 1.0
_WITHIN_S = 600.0
"""By then they have ended by their idle time."""

_log = structlog.get_logger()


class LeftBehind:
    """The tasks that abort such groups. `aclose` ends them: of a runner that ends all groups are given up."""

    def __init__(self, clients: Sequence[RolloutClient]) -> None:
        self._clients = clients
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, group: GroupOpened) -> None:
        task = asyncio.create_task(self._abort(group), name=f"aborting {group.group_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _abort(self, group: GroupOpened) -> None:
        ends = time.monotonic() + _WITHIN_S
        while time.monotonic() < ends:
            for client in self._clients:
                if all(await asyncio.gather(*(_ended(client, session_id) for session_id in group.session_ids))):
                    _log.info("group aborted later", group=group.group_id)
                    return
            await asyncio.sleep(_AGAIN_S)


async def _ended(client: RolloutClient, session_id: str) -> bool:
    """Abort the session; returns whether it has ended, however it did."""
    try:
        await client.abort_session(session_id)
    except (SessionConcludedError, SessionExpiredError, ConcludedError, NotFoundError):
        return True
    except RollmeshError:
        return False
    return True
