"""Waits until services are ready: each has a name and a deadline, and says what is still missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.host.aio import TELL_EVERY_S
from services.supervisor.launch_plan import LaunchPlan
from services.supervisor.processes import Say, ServiceFailedError
from services.wire.errors import UNDECODABLE, RollmeshError

REDIS_DEADLINE_S = 15.0
_POLL_S = 0.25


def named_urls(plan: LaunchPlan) -> list[tuple[str, str]]:
    """Name and address of every service that answers HTTP."""
    named = [(plan.bus.name, plan.bus_url)]
    named += [(spec.name, url) for spec, url in zip(plan.servers, plan.server_urls, strict=True)]
    if plan.gateway is not None and plan.gateway_url is not None:
        named.append((plan.gateway.name, plan.gateway_url))
    if plan.rewards is not None and plan.rewards_url is not None:
        named.append((plan.rewards.name, plan.rewards_url))
    if plan.teacher is not None and plan.teacher_url is not None:
        named.append((plan.teacher.name, plan.teacher_url))
    return named


def first_cause(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to tell of: one of ours before anything else."""
    first: BaseException = failed.exceptions[0]
    for error in failed.exceptions:
        if isinstance(error, RollmeshError):
            first = error
            break
    return first_cause(first) if isinstance(first, BaseExceptionGroup) else first


class _Reasons(msgspec.Struct):
    not_ready: list[str] = []


@dataclass(frozen=True)
class Clock:
    """`now`: seconds; `pause`: for so many."""

    now: Callable[[], float] = time.monotonic
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep


MONOTONIC = Clock()


async def wait_for_http(
    name: str,
    url: str,
    deadline_s: float,
    http: httpx.AsyncClient,
    say: Say,
    clock: Clock = MONOTONIC,
    *,
    begun: Callable[[], bool] = lambda: True,
    missing: Say = lambda _: None,
) -> None:
    """Until `GET {url}/readyz` answers 200; `missing` is told what is missing, every TELL_EVERY_S `say` is. The deadline
    counts from when `begun` says that it can become ready at all.

    Raises ServiceFailedError, naming what is still missing, after the deadline.
    """
    began = told = since = clock.now()
    while True:
        try:
            response = await http.get(f"{url}/readyz", timeout=5.0)
            if response.status_code == 200:
                return
            why = "; ".join(msgspec.json.decode(response.content, type=_Reasons).not_ready)
        except httpx.ConnectError as error:
            # Nothing listens while it loads; a certificate that is refused comes here, too.
            why = f"no connection yet ({error})"
        except httpx.TransportError as error:
            why = f"nothing answers yet ({type(error).__name__})"
        except UNDECODABLE:
            why = f"it answers {response.status_code}"
        missing(why)
        now = clock.now()
        if not begun():
            since = now
        if now - since > deadline_s:
            raise ServiceFailedError(
                f"{name} was not ready after {deadline_s:g} s ({why})",
                f"see its log, {url}; rollout.start_timeout_s gives it longer",
            )
        if now - told >= TELL_EVERY_S:
            told = now
            say(f"{name} is not ready after {now - began:.0f} s, it has {deadline_s:g} s: {why}")
        await clock.pause(_POLL_S)


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
