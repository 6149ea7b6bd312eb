"""Client-side load balancing over rollout servers: round robin, skipping servers that are down."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import structlog

from clients.rollout.client import RolloutClient
from services.wire.errors import DeadlineError

_log = structlog.get_logger()
ASIDE_S = 1.0


class ServerPool:
    """Round robin over `clients`. A server that was set aside is tried again after a second."""

    def __init__(self, clients: Sequence[RolloutClient], *, patience_s: float = 120.0) -> None:
        """`patience_s`: how long all servers may be down before `choose` gives up."""
        self.clients = list(clients)
        self._aside_until = dict.fromkeys(self.clients, 0.0)
        self._turn = itertools.cycle(self.clients)
        self._patience_s = patience_s

    async def choose(self) -> RolloutClient:
        """The next server that is not set aside. Raises DeadlineError when there was none for `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            now = time.monotonic()
            for client in itertools.islice(self._turn, len(self.clients)):
                if self._aside_until[client] <= now:
                    return client
            await asyncio.sleep(min(self._aside_until.values()) - now)
        urls = ", ".join(client.url for client in self.clients)
        raise DeadlineError(f"no rollout server of {urls} answered for {self._patience_s:g} s", "see their logs")

    def set_aside(self, client: RolloutClient, why: str) -> None:
        """Leave a server out for a moment."""
        _log.warning("rollout server set aside", url=client.url, why=why)
        self._aside_until[client] = time.monotonic() + ASIDE_S
