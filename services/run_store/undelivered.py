"""Calls whose answers no agent got: noted by gateways that gave them up, heeded when their sessions are finished.

    gateway: 504, or the agent hung up ──note──► undelivered:{group}        before the agent hears of it
    server:  the answer is captured, or given again ──► no longer noted      by the script that writes it, or `withdraw`
    server:  the session is finished ──► answers that are noted are no part of it (`services.run_store.publishing`)

Nothing here costs an answered call a round trip.
"""

from __future__ import annotations

from redis.asyncio import Redis

from services.run_store.keys import RunKeys
from services.run_store.session_groups import SessionGroups
from services.wire.errors import RollmeshError

KEEP_S = 24 * 3600
"""How long a note outlives the last one of its group; the group's end shortens it."""
MOST_NOTES = 1024
"""Of one group: an agent that hangs up for ever does not fill Redis."""

# KEYS: the group's notes. ARGV: call, most notes, seconds.
_NOTE = """
if redis.call('SCARD', KEYS[1]) < tonumber(ARGV[2]) then redis.call('SADD', KEYS[1], ARGV[1]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""


class UndeliveredError(RollmeshError):
    """Trajectories were not appended: calls of a group are noted that were not reckoned with."""

    def __init__(self, group_id: str, calls: frozenset[str]) -> None:
        super().__init__(f"group {group_id}: {len(calls)} calls are noted as undelivered", "finish it without them")
        self.group_id = group_id
        self.calls = calls


class UndeliveredCalls:
    """Notes and withdraws calls of one run. Every method raises RedisError."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._sessions = SessionGroups(redis, run_id)
        self._note = redis.register_script(_NOTE)

    async def note(self, call: str, *, session_id: str | None, group_id: str | None) -> None:
        """No agent got anything of the answer to `call`, which named this session or group.

        Nothing is noted of a session that nobody knows, and of a call whose name servers refuse.
        """
        if not (call.isascii() and call.isalnum()):
            return
        if group_id is None and session_id is not None:
            group_id = await self._sessions.group_of(session_id)
        if group_id is not None:
            await self._note(keys=[self._keys.undelivered(group_id)], args=[call, MOST_NOTES, KEEP_S])

    async def withdraw(self, group_id: str, call: str) -> None:
        """The answer to `call` is given again."""
        await self._redis.srem(self._keys.undelivered(group_id), call)
