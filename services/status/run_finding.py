"""Which run is meant: the one that was named, or the only one that Redis knows."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from services.redis_client import as_text
from services.run_keys import RunKeys
from services.wire.errors import DeadlineError, UsageError

_WITHIN_S = 5.0
_MARK = "*"


async def find_run(redis: Redis, run_id: str | None) -> str:
    """Raises UsageError where there is no such run, or no telling which; DeadlineError where Redis does not answer."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            if run_id is not None and await _exists(redis, run_id):
                return run_id
            known = await _runs(redis)
    except TimeoutError as error:
        raise DeadlineError(f"Redis has not answered within {_WITHIN_S:g} s", "see whether it runs") from error
    shown = ", ".join(known) or "none"
    if run_id is not None:
        raise UsageError(f"Redis knows no run {run_id!r}", f"known: {shown}")
    if len(known) != 1:
        raise UsageError(f"Redis knows {len(known)} runs", f"name one with --run-id; known: {shown}")
    return known[0]


async def _exists(redis: Redis, run_id: str) -> bool:
    keys = RunKeys(run_id)
    return bool(await redis.exists(keys.accounts, keys.services))


async def _runs(redis: Redis) -> list[str]:
    before, _, after = RunKeys(_MARK).accounts.partition(_MARK)
    found = {as_text(key) async for key in redis.scan_iter(match=RunKeys(_MARK).accounts, count=1000)}
    return sorted(key.removeprefix(before).removesuffix(after) for key in found)
