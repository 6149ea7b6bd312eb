"""Waiting until a service can be used: each wait has a name, a deadline, and says what was still missing."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.supervisor.keeper import ServiceFailedError

_POLL_S = 0.25


class _Reasons(msgspec.Struct):
    not_ready: list[str] = []


async def wait_for_http(name: str, url: str, deadline_s: float, http: httpx.AsyncClient) -> None:
    """Until `GET {url}/readyz` answers 200. Raises ServiceFailedError, naming what is still missing, after the deadline."""
    ends = time.monotonic() + deadline_s
    while True:
        try:
            response = await http.get(f"{url}/readyz", timeout=5.0)
            if response.status_code == 200:
                return
            missing = "; ".join(msgspec.json.decode(response.content, type=_Reasons).not_ready)
        except httpx.TransportError as error:
            missing = f"nothing answers ({type(error).__name__})"
        except msgspec.MsgspecError:
            missing = f"it answers {response.status_code}"
        if time.monotonic() > ends:
            raise ServiceFailedError(f"{name} was not ready after {deadline_s:g} s ({missing})", f"see its log, {url}")
        await asyncio.sleep(_POLL_S)


async def wait_for_answer(url: str, http: httpx.AsyncClient) -> None:
    """Until `GET {url}/livez` answers at all: the process has done its imports. Whoever waits sets the deadline."""
    while True:
        try:
            await http.get(f"{url}/livez", timeout=5.0)
            return
        except httpx.TransportError:
            await asyncio.sleep(_POLL_S)


async def wait_for_redis(redis: Redis, deadline_s: float) -> None:
    """Until PING is answered (a server that still reads its append-only file answers an error)."""
    ends = time.monotonic() + deadline_s
    while True:
        try:
            await redis.ping()
            return
        except (RedisError, OSError) as error:
            if time.monotonic() > ends:
                raise ServiceFailedError(
                    f"Valkey did not answer within {deadline_s:g} s ({error})", "see valkey.log"
                ) from error
        await asyncio.sleep(0.01)
