"""An engine's registration with the weight bus: register, then send heartbeats within the lease.

unregistered ──register──► registered ──heartbeat──► registered
     ▲                        │ the bus does not answer: keep trying; past the lease, unregistered
     └────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from services.wire.errors import RollmeshError, UntrustedError
from services.wire.weights_api import EngineRegistered

RETRY_S = 0.25
HEARTBEATS_A_LEASE = 3
LEAVE_WITHIN_S = 2.0

_log = structlog.get_logger()


class Bus(Protocol):
    """What membership needs of `weight_bus.client.bus_client.BusClient`."""

    async def register(
        self, engine_id: str, url: str, policy_version: int, *, staged_version: int | None = None, ranks: int = 1
    ) -> EngineRegistered: ...

    async def deregister(self, engine_id: str) -> None: ...

    async def close(self) -> None: ...


class Membership:
    """Keeps one engine registered. `run` is a task owned by the server.

    `policy_version`, `staged_version`: what the engine serves and what a commit would serve; a restarted bus learns its
    engines' versions from them. `ranks`: how many must have staged a version before the engine has.
    """

    def __init__(
        self,
        bus: Bus,
        engine_id: str,
        url: str,
        policy_version: Callable[[], int],
        staged_version: Callable[[], int | None] = lambda: None,
        ranks: Callable[[], int] = lambda: 1,
    ) -> None:
        self._bus = bus
        self._engine_id = engine_id
        self._url = url
        self._policy_version = policy_version
        self._staged_version = staged_version
        self._ranks = ranks
        self._lease_ends: float | None = None
        self._reason = "has not answered yet"

    def not_ready(self) -> str | None:
        """Why the bus does not know this engine, or None when it does."""
        if self._lease_ends is not None and time.monotonic() < self._lease_ends:
            return None
        return f"not registered with the weight bus, which {self._reason}"

    async def run(self) -> None:
        """Register and heartbeat until cancelled. A bus that is away or restarts is waited for.

        Raises UntrustedError where the bus's certificate was never accepted: waiting does not help.
        """
        failing = False
        while True:
            try:
                answer = await self._bus.register(
                    self._engine_id,
                    self._url,
                    self._policy_version(),
                    staged_version=self._staged_version(),
                    ranks=self._ranks(),
                )
            except RollmeshError as error:
                if isinstance(error, UntrustedError) and self._lease_ends is None:
                    raise
                self._reason = f"answers: {error}"
                if not failing:
                    _log.warning("waiting", waiting_for="the weight bus", why=str(error))
                failing = True
                await asyncio.sleep(RETRY_S)
                continue
            if failing or self._lease_ends is None:
                _log.info("registered with the weight bus", lease_s=answer.lease_s, latest=answer.latest_version)
            failing = False
            self._reason = "let the lease run out"
            self._lease_ends = time.monotonic() + answer.lease_s
            await asyncio.sleep(answer.lease_s / HEARTBEATS_A_LEASE)

    async def leave(self) -> None:
        """Deregister, if the bus answers in time (else the lease runs out by itself), and close the client."""
        try:
            if self._lease_ends is not None:
                async with asyncio.timeout(LEAVE_WITHIN_S):
                    await self._bus.deregister(self._engine_id)
        except (RollmeshError, TimeoutError) as error:
            _log.warning("could not deregister from the weight bus", why=repr(error))
        finally:
            await self._bus.close()
