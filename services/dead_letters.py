"""Dead letters: trajectories that were taken from the stream and never trained, each with the reason, the newest of a run.

    stream entry ──settled as dropped, with a reason──► counted by cause (all)  +  dead letter (the newest KEPT)

They are written by the script that settles the entry (`services.stream`), so a drop that is counted has its letter. What
is left over when a run concludes is no dead letter: nothing was wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec
from redis.asyncio import Redis

from services.redis_client import as_text
from services.run_keys import RunKeys

KEPT = 512
"""Letters a run keeps: with LARGEST, at most 32 MiB."""
LARGEST = 64 << 10
"""Bytes of an entry that its letter carries whole; of a larger one it tells the size alone."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """`entry`: its id in the trajectory stream. `cause`: what it is counted under; `why`: in words, with the values."""

    entry: str
    cause: str
    why: str
    settled_at: float
    """Unix seconds."""
    size: int
    """Bytes of the entry."""
    payload: bytes
    """The entry as it was read; empty where it was larger than LARGEST."""


class DeadLetters:
    """A run's dead letters, for people. Each method is one round trip."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._key = RunKeys(run_id).dead

    async def newest(self, count: int) -> list[DeadLetter]:
        """Up to `count` of them, the newest first."""
        reply = await self._redis.xrevrange(self._key, count=count)
        found = cast("list[tuple[bytes, dict[bytes, bytes]]]", reply or [])
        return [_letter(as_text(letter_id), fields) for letter_id, fields in found]


def _letter(letter_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        entry=as_text(fields[b"entry"]),
        cause=as_text(fields[b"cause"]),
        why=as_text(fields[b"why"]),
        settled_at=int(letter_id.partition("-")[0]) / 1000,
        size=int(fields[b"size"]),
        payload=fields[b"t"],
    )
