"""Redis client: made here alone, so that no socket timeout cuts a blocking read short, and every client signs in."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.security.tls import PUBLIC, Trust
from services.wire.errors import UsageError

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


def connect(url: str) -> Redis:
    """A client for `url`. No socket timeout (blocking reads carry their own deadline); broken connections are retried."""
    return Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=5.0,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 5),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
        health_check_interval=30,
    )


async def check_reachable(url: str) -> None:
    """Raise UsageError, in one line, when no Redis answers at `url`, UntrustedError where somebody else does."""
    shown = without_password(url)
    try:
        client = Redis.from_url(
            url, socket_timeout=3.0, socket_connect_timeout=3.0, retry=Retry(ExponentialBackoff(), 0)
        )
    except ValueError as error:
        raise UsageError(f"{shown!r} is no Redis address ({error})", "write redis://host:port/0") from error
    try:
        await client.ping()
    except AuthenticationError as error:
        raise UsageError(
            f"Redis at {shown} does not take the password ({error})",
            "see --redis-password-file, or redis.key of --keys-dir",
        ) from error
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        named = parse_qs(urlsplit(url).query).get(_AUTHORITY, [])
        if (refused := Trust(Path(named[0]) if named else None).refusal(shown, error)) is not None:
            raise refused from error
        raise UsageError(
            f"no Redis answers at {shown} ({error})", "start one there, or leave --redis-url out for the embedded one"
        ) from error
    finally:
        await client.aclose()


def as_text(value: bytes | str) -> str:
    """Replies are bytes; redis-py's types allow either."""
    return value.decode() if isinstance(value, bytes) else value
