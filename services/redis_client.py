"""One way to make a Redis client, so that no blocking read is cut short by a socket timeout."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.wire.errors import UsageError


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
    """Raise UsageError, in one line, when no Redis answers at `url`."""
    try:
        client = Redis.from_url(
            url, socket_timeout=3.0, socket_connect_timeout=3.0, retry=Retry(ExponentialBackoff(), 0)
        )
    except ValueError as error:
        raise UsageError(f"{url!r} is no Redis address ({error})", "write redis://host:port/0") from error
    try:
        await client.ping()
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        raise UsageError(
            f"no Redis answers at {url} ({error})", "start one there, or leave --redis-url out for the embedded one"
        ) from error
    finally:
        await client.aclose()


def as_text(value: bytes | str) -> str:
    """Replies are bytes; redis-py's types allow either."""
    return value.decode() if isinstance(value, bytes) else value
