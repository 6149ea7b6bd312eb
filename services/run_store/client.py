"""Redis client: made here alone, so that no call waits for ever, no timeout cuts a blocking read, and each signs in.

A connection on which nothing comes for ANSWER_WITHIN_S is given up, and the command is made again on a new one
(`services.run_store.patience`): every script here does no harm when it is made twice.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.policies.diagnosis.finding import refuse, refused_as
from services.policies.diagnosis.store import OLDEST, StoreFacts, of_store
from services.run_store.patience import ANSWER_WITHIN_S, RETRY_WITHIN_S, Outage, PatientRetry
from services.run_store.pipelining import PipeliningRedis
from services.security.tls import PUBLIC, Trust
from services.wire.errors import UsageError

LONGEST_BLOCK_MS = 2000
"""Of a blocking read."""
CONNECT_WITHIN_S = 2.0
START_WITHIN_S = 40.0
"""How long a process that starts waits for a Redis that does not answer, as in a partition."""
_REFUSED_WITHIN_S = 5.0
"""The same where connections are refused: nobody is there. A Redis that is started again is back by then."""

_log = structlog.get_logger()

_AUTHORITY = "ssl_ca_certs"
"""What redis-py calls the file with the authority, in a URL's query too."""


def with_password(url: str, password: str | None) -> str:
    """`url` with the password that was given by file, for `connect` and `check_reachable`: it is never printed.

    Raises UsageError for a password in `url` itself, which came by a command line that every process can read.
    """
    parts = urlsplit(url)
    if parts.password is not None or "password=" in parts.query:
        raise UsageError("the Redis address holds a password", "give it by file: --redis-password-file or --keys-dir")
    if password is None:
        return url
    _, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{host}").geturl()


def reached_by(url: str, password: str | None, trust: Trust = PUBLIC) -> str:
    """`url` for `connect` and `check_reachable`: with the password (`with_password`), `rediss://` with the authority.

    One that `url` itself names (`?ssl_ca_certs=FILE`) goes before the mesh's.
    """
    parts = urlsplit(with_password(url, password))
    if parts.scheme != "rediss" or trust.authority is None or _AUTHORITY in parts.query:
        return parts.geturl()
    authority = f"{_AUTHORITY}={quote(str(trust.authority.absolute()), safe='')}"
    return parts._replace(query="&".join(filter(None, (parts.query, authority)))).geturl()


def without_password(url: str) -> str:
    """As `url` may be printed."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    _, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl()


def connect(
    url: str,
    *,
    answer_within_s: float = ANSWER_WITHIN_S,
    connect_within_s: float = CONNECT_WITHIN_S,
    retry_within_s: float = RETRY_WITHIN_S,
) -> Redis:
    """A client for `url`. Commands raise RedisError when Redis has not answered after `retry_within_s` and one more try.

    `answer_within_s`: the longest time that one attempt may take, with its connection.
    """
    options: dict[str, Any] = {}
    if urlsplit(url).scheme != "unix":
        options = {"socket_keepalive": True, "socket_keepalive_options": _keepalive(answer_within_s)}
    retry = PatientRetry(Outage(without_password(url)), answer_within_s, retry_within_s)
    client = PipeliningRedis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=connect_within_s,
        retry=retry,
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
        health_check_interval=30,
        **options,
    )
    assert isinstance(client, PipeliningRedis)
    client.fail_after_s = answer_within_s
    return client


def _impatient(url: str) -> Redis:
    """A client for a look at who answers at `url`."""
    return Redis.from_url(url, socket_timeout=3.0, socket_connect_timeout=3.0, retry=Retry(NoBackoff(), 0))


def _keepalive(within_s: float) -> dict[int, int]:
    """Socket options by which the kernel finds that an idle connection is cut, and gives up what is not acknowledged.

    They differ by system: those that this one lacks are left out.
    """
    wanted = {
        "TCP_KEEPIDLE": 5,
        "TCP_KEEPINTVL": 2,
        "TCP_KEEPCNT": 3,
        # Milliseconds. It also bounds how long a connection that was given up lingers with what it has not sent.
        "TCP_USER_TIMEOUT": round(2 * within_s * 1000),
    }
    return {int(getattr(socket, name)): value for name, value in wanted.items() if hasattr(socket, name)}


async def check_store(url: str, *, within_s: float = 0.0) -> None:
    """Raise UsageError, in one line, when the Redis at `url` cannot hold a run: as `check_reachable`, where it evicts keys,
    and where it is too old."""
    with refused_as("redis-unreachable"):
        store, _ = await read_store(url, within_s=within_s)
    refuse(of_store(store))
    if store.eviction is None:
        _log.warning("Redis does not say whether it evicts keys; a run needs noeviction", redis=without_password(url))


async def read_store(url: str, *, within_s: float = 0.0) -> tuple[StoreFacts, float]:
    """What the Redis at `url` says of itself, and its clock (Unix seconds). Raises as `check_reachable`, UsageError where
    it does not answer any more."""
    await check_reachable(url, within_s=within_s)
    client = _impatient(url)
    try:
        seconds, microseconds = await client.time()
        # Several at once only Redis 7 takes. Where they are forbidden, as in hosted ones, INFO tells most of it.
        configured: dict[str, Any] = {}
        for name in ("maxmemory-policy", "maxmemory", "appendonly", "save"):
            configured |= await _told(client.config_get(name))
        server, memory = await _told(client.info("server")), await _told(client.info("memory"))
    except (RedisConnectionError, RedisTimeoutError) as error:
        raise UsageError(f"Redis at {without_password(url)} does not answer ({error})", "see that it runs") from error
    finally:
        await client.aclose()
    eviction = configured.get("maxmemory-policy") or memory.get("maxmemory_policy")
    most = configured.get("maxmemory") or memory.get("maxmemory")
    facts = StoreFacts(
        url=without_password(url),
        version=_version(str(server.get("valkey_version") or server.get("redis_version") or "")),
        eviction=None if eviction is None else str(eviction),
        maxmemory=int(most) if most is not None and str(most).isdigit() else None,
        appendonly=None if "appendonly" not in configured else configured["appendonly"] == "yes",
        saves=None if "save" not in configured else bool(configured["save"]),
    )
    return facts, seconds + microseconds / 1e6


async def _told(asking: Awaitable[Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """Nothing where this user may not ask."""
    try:
        return await asking
    except ResponseError:
        return {}


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


async def check_reachable(url: str, *, within_s: float = 0.0) -> None:
    """Raise UsageError, in one line, when no Redis answers at `url`, UntrustedError where somebody else does.

    `within_s`: for so long one that does not answer is waited for; one that refuses connections for less.
    """
    shown, began = without_password(url), time.monotonic()
    try:
        client = _impatient(url)
    except ValueError as error:
        raise UsageError(f"{shown!r} is no Redis address ({error})", "write redis://host:port/0") from error
    waiting = False
    try:
        while True:
            try:
                await client.ping()
                return
            except AuthenticationError as error:
                raise UsageError(
                    f"Redis at {shown} does not take the password ({error})",
                    "see --redis-password-file, or redis.key of --keys-dir",
                ) from error
            except ResponseError as error:
                # Of before 6.0: it does not know how a connection begins now.
                with refused_as("redis-too-old"):
                    raise UsageError(
                        f"what answers at {shown} is no Redis that a run can use ({error})",
                        f"use Redis {OLDEST[0]}.{OLDEST[1]} or newer, or Valkey, or leave --redis-url out",
                    ) from error
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                named = parse_qs(urlsplit(url).query).get(_AUTHORITY, [])
                if (refused := Trust(Path(named[0]) if named else None).refusal(shown, error)) is not None:
                    raise refused from error
                refusing = isinstance(error.__context__, ConnectionRefusedError)
                if time.monotonic() - began >= (min(within_s, _REFUSED_WITHIN_S) if refusing else within_s):
                    raise UsageError(
                        f"no Redis answers at {shown} ({error})",
                        "start one there, or leave --redis-url out for the embedded one",
                    ) from error
                if not waiting and not refusing:
                    _log.warning("waiting for Redis", redis=shown, for_s=within_s, why=str(error))
                waiting = waiting or not refusing
                await asyncio.sleep(0.1)
    finally:
        await client.aclose()


def as_text(value: bytes | str) -> str:
    """Replies are bytes; redis-py's types allow either."""
    return value.decode() if isinstance(value, bytes) else value
