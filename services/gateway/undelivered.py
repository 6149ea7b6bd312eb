"""Calls that the gateway gave up before the agent got anything of their answers: noted, so that they are not trained.

    504, 503, or the agent hung up; nothing passed on ──► noted in Redis ──► only now the agent hears of it
                                        └─ Redis is away ──► kept here, and written before a later call of the same session

A server may have captured the answer all the same: its journal was written and the reply lost, or it died, or was cut off,
before it could send it. What is noted is left out when the session is finished, unless a retry of the call gets it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.request import ProxiedCall
from services.run_store.undelivered import UndeliveredCalls
from services.wire.errors import NotReadyError

_REDIS_WITHIN_S = 2.0
_RETRY_EVERY_S = 1.0
_MOST_KEPT = 10_000
"""Notes that wait for Redis; beyond, the oldest are forgotten, and what they name is trained."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Named:
    """What a call named."""

    session_id: str | None
    group_id: str | None


class Undelivered:
    """Notes calls, at once or as soon as Redis can be written. `run` is a task owned by the gateway."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._calls = UndeliveredCalls(redis, run_id)
        self._kept: dict[str, _Named] = {}
        self._writing = asyncio.Lock()

    async def note(self, call: ProxiedCall) -> None:
        """The agent got nothing of the answer to `call`. Takes a few seconds at most, and raises nothing."""
        if not call.generates or (call.session_id is None and call.group_id is None):
            return
        self._kept[call.call_id] = _Named(call.session_id, call.group_id)
        while len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        await self._write()

    async def check_written(self, call: ProxiedCall) -> None:
        """Before `call` is sent: what was noted of its session stands in Redis.

        So neither a retry nor the session's end overtakes it. Raises NotReadyError where it cannot be written.
        """
        if self._kept and self._concern(call) and not await self._write() and self._concern(call):
            what = "an earlier call of this session was given up, and Redis cannot be told"
            raise NotReadyError(what, "send the call again")

    async def run(self) -> None:
        """Write what waits until cancelled."""
        while True:
            await asyncio.sleep(_RETRY_EVERY_S)
            if self._kept:
                await self._write()

    def _concern(self, call: ProxiedCall) -> bool:
        """Whether a note that waits may be of this call's session. Which sessions a group has is not known here."""
        if call.group_id is not None:
            return bool(self._kept)
        return call.session_id is not None and any(
            each.group_id is not None or each.session_id == call.session_id for each in self._kept.values()
        )

    async def _write(self) -> bool:
        """Returns whether nothing waits any more."""
        try:
            # Whoever comes while another writes waits for that one, no longer than if it wrote itself.
            async with asyncio.timeout(_REDIS_WITHIN_S), self._writing:
                for name, call in list(self._kept.items()):
                    await self._calls.note(name, session_id=call.session_id, group_id=call.group_id)
                    self._kept.pop(name, None)
        except (RedisError, OSError, TimeoutError) as error:
            _log.warning("calls that were given up cannot be noted yet", calls=len(self._kept), error=repr(error))
        return not self._kept
