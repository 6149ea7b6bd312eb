"""Watching the engine: one that serves nothing any more, behind a server that lives, must not keep its sessions.

serving ──the engine fails──► announced as draining, groups let go of, none taken ──it serves again──► serving
"""

from __future__ import annotations

import asyncio

import structlog
from redis.exceptions import RedisError

from rollout_server.adoption import Adopter
from rollout_server.announcing import Announcer
from rollout_server.draining import Drainer
from rollout_server.engines.base import Engine
from services.wire.errors import NotReadyError

POLL_S = 0.5

_log = structlog.get_logger()


class EngineWatch:
    """`run` is a task owned by the server."""

    def __init__(self, engine: Engine, adopter: Adopter, drainer: Drainer, announcer: Announcer) -> None:
        self._engine = engine
        self._adopter = adopter
        self._drainer = drainer
        self._announcer = announcer

    async def run(self) -> None:
        """Watch until cancelled."""
        failed: str | None = None
        while True:
            await asyncio.sleep(POLL_S)
            failure = self._engine.status().failure
            if failure != failed:
                _log.warning("engine", failure=failure)
                failed = failure
                self._adopter.taking = failure is None
                self._announcer.notify()
            if failure is not None:
                try:
                    await self._drainer.hand_over(NotReadyError(failure, "send the call again"))
                except RedisError as error:
                    _log.warning("cannot hand sessions over", why=str(error))
