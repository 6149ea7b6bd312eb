"""Which group a session is of, for servers and gateways that do not hold it: its id says so, or Redis does.

opened with its whole group    `<group>.<member>`    known as long as the group's journal; nothing is written for it
opened by itself               any other id          `group-of:<session>`, which goes before what the id says
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from redis.asyncio import Redis

from services.run_store.client import as_text
from services.run_store.keys import RunKeys


def sibling_id(group_id: str, member: int) -> str:
    """The id of a session that is opened with its group, and of its trajectory."""
    return f"{group_id}.{member}"


def named_group(session_id: str) -> str | None:
    """The group that an id names, if it is one of `sibling_id`. A client may have chosen such an id for another group."""
    group_id, _, member = session_id.rpartition(".")
    return group_id if group_id and member.isdecimal() else None


def keys_of_sessions(keys: RunKeys, group_id: str, session_ids: Iterable[str]) -> list[str]:
    """Of those sessions of a group whose ids do not say that they are."""
    return [keys.group_of(name) for name in session_ids if named_group(name) != group_id]


class SessionGroups:
    """The sessions of one run. All methods are one round trip, and raise RedisError."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)

    async def group_of(self, session_id: str) -> str | None:
        """The group; None where nobody has opened such a session, or its group's end is forgotten."""
        written = self._redis.get(self._keys.group_of(session_id))
        named = named_group(session_id)
        if named is None:
            found = await written
        else:
            found, known = await asyncio.gather(written, self._redis.exists(self._keys.journal(named)))
            if found is None and known:
                return named
        return None if found is None else as_text(found)
