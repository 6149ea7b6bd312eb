"""Which session keys are this run's: a gateway refuses made-up ones before it reads a body, without asking a server."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.run_store.ledger import Ledger
from services.security.keys import SessionKeys, secret_of_run
from services.security.permissions import Keys, is_keyless
from services.wire.errors import NotReadyError

_READ_WITHIN_S = 2.0


class IssuedKeys:
    """A `SessionKeyCheck`. `keys`: the gateway's own; without a session key among them the run's secret is in Redis.

    That is read once, with the first key that is to be checked. A gateway without any key leaves the check to the servers.
    """

    def __init__(self, redis: Redis, run_id: str, keys: Keys) -> None:
        self._ledger = Ledger(redis, run_id)
        self._keyless = is_keyless(keys)
        self._known = None if keys.session is None else SessionKeys(secret_of_run(keys.session, run_id))
        self._reading = asyncio.Lock()

    async def __call__(self, key: str) -> bool:
        """Whether a session's key was issued in this run. Raises NotReadyError while Redis, where the secret is, fails."""
        if self._keyless:
            return True
        known = self._known or await self._read()
        return known.session_of(key) is not None

    async def _read(self) -> SessionKeys:
        async with self._reading:
            if self._known is not None:
                return self._known
            try:
                async with asyncio.timeout(_READ_WITHIN_S):
                    self._known = SessionKeys(await self._ledger.session_secret())
            except (RedisError, OSError, TimeoutError) as error:
                raise NotReadyError(f"the run's session secret cannot be read ({error!r})", "try again") from error
            return self._known
