"""Patience with Redis: how long a command is repeated, what is said meanwhile, and what may be repeated for longer.

command ──no answer──► its connection is given up, a new one is tried ──RETRY_WITHIN_S──► the error is the caller's
             └── one warning a Redis, within seconds; again while it lasts; a line when it answers

repeated(call) ──► the same, until a deadline of minutes: for what must not be lost and does no harm twice
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import structlog
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.policies.backoff import growing_delay
from services.wire.errors import DeadlineError

ANSWER_WITHIN_S = 3.0
"""A command that is not answered within so long lost its connection; a blocking read must end before."""
RETRY_WITHIN_S = 6.0
"""After so long a command is not begun again."""
REPEAT_WITHIN_S = 120.0
"""Longer than a Redis takes to start and to read its files again."""
_SAY_AFTER_S, _SAY_EVERY_S = 1.0, 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0

_log = structlog.get_logger()
T = TypeVar("T")


class Outage:
    """Says in the log that one Redis does not answer, and when it does again. `shown`: its address without a password."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._since: float | None = None
        self._said_at: float | None = None

    def failed(self, error: Exception) -> None:
        """A command got no answer, or no connection. One that is refused for a moment is no news: Redis starts."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if self._said_at is None:
            due = isinstance(error, RedisTimeoutError) or now - self._since >= _SAY_AFTER_S
        else:
            due = now - self._said_at >= _SAY_EVERY_S
        if due:
            self._said_at = now
            _log.warning("Redis does not answer", redis=self._shown, for_s=round(now - self._since, 1), why=str(error))

    def answered(self) -> None:
        """A command was answered."""
        if self._since is not None and self._said_at is not None:
            _log.info("Redis answers again", redis=self._shown, after_s=round(time.monotonic() - self._since, 1))
        self._since = self._said_at = None


_in_command: ContextVar[bool] = ContextVar("whether a command is being made", default=False)


class PatientRetry(Retry):
    """Gives each attempt of a command `answer_within_s` seconds, and makes it again for `within_s`.

    redis-py counts attempts instead, and those of a connection within those of a command: where nothing answers, nobody
    could say how long a call takes. Its `socket_timeout` is not used: it makes a task of every command, and
    `asyncio.wait_for` swallows a cancellation now and then before Python 3.12.

    A password that is not taken is not tried again.
    """

    def __init__(self, outage: Outage, answer_within_s: float, within_s: float) -> None:
        super().__init__(ExponentialBackoff(cap=0.5, base=0.05), retries=-1)
        self._outage = outage
        self.answer_within_s, self._within_s = answer_within_s, within_s

    def __deepcopy__(self, memo: object) -> PatientRetry:
        """Every connection of a client has the same: they tell one `Outage`."""
        return self

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """Raises what the last attempt raised."""
        if _in_command.get():
            # The connection that a command needs: it is the command that is made again.
            return await self._attempt(do, fail, 1 if with_failure_count else None)
        ends = time.monotonic() + self._within_s
        return await self._until_answered(do, fail, is_retryable, with_failure_count, ends)

    async def again(
        self, do: Callable[[], Awaitable[T]], fail: Callable[..., Any], error: Exception, began: float
    ) -> T:
        """As `call_with_retry`, of what was made once without it, at `began` (monotonic clock), and failed with `error`."""
        await fail(error)
        if not isinstance(error, self._supported_errors):
            raise error
        ends = began + self._within_s
        await self._pause(error, 1, ends)
        return await self._until_answered(do, fail, None, False, ends, failures=1)

    async def _until_answered(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None,
        with_failure_count: bool,
        ends: float,
        failures: int = 0,
    ) -> T:
        token = _in_command.set(True)
        try:
            while True:
                try:
                    answer = await self._attempt(self._timed(do), fail, failures + 1 if with_failure_count else None)
                except AuthenticationError:
                    raise
                except self._supported_errors as error:
                    if is_retryable is not None and not is_retryable(error):
                        raise
                    failures += 1
                    await self._pause(error, failures, ends)
                else:
                    if answer is not None:
                        # redis-py opens its connections through here too, and one that is open already asks Redis nothing.
                        self._outage.answered()
                    return answer
        finally:
            _in_command.reset(token)

    async def _pause(self, error: Exception, failures: int, ends: float) -> None:
        """Before the next attempt. Raises `error` where that would be too late."""
        self._outage.failed(error)
        pause = self._backoff.compute(failures)
        if time.monotonic() + pause >= ends:
            raise error
        await asyncio.sleep(pause)

    def _timed(self, do: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        async def timed() -> T:
            try:
                async with asyncio.timeout(self.answer_within_s):
                    return await do()
            except TimeoutError as error:
                raise RedisTimeoutError(f"no answer within {self.answer_within_s:g} s") from error

        return timed

    async def _attempt(self, do: Callable[[], Awaitable[T]], fail: Callable[..., Any], number: int | None) -> T:
        try:
            return await do()
        except self._supported_errors as error:
            await (fail(error) if number is None else fail(error, number))
            raise


def passes(error: RedisError) -> bool:
    """Whether an error may pass by itself: no connection, no answer, Redis that starts, has no memory or no disk."""
    if isinstance(error, AuthenticationError):
        return False
    if isinstance(error, RedisConnectionError | RedisTimeoutError | OutOfMemoryError | ReadOnlyError):
        return True
    if isinstance(error, ClusterDownError | TryAgainError):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(("OOM ", "MISCONF ", "NOREPLICAS ", "BUSY "))


async def repeated(call: Callable[[], Awaitable[T]], name: str, within_s: float = REPEAT_WITHIN_S) -> T:
    """The answer of `call`, made again while Redis fails in a way that may pass. It must do no harm when made twice.

    Raises DeadlineError when Redis has failed for `within_s` seconds, and what `call` raises otherwise.
    """
    began, tries = time.monotonic(), 0
    while True:
        try:
            answer = await call()
        except RedisError as error:
            if not passes(error):
                raise
            tries += 1
            if tries == 1:
                _log.warning("a call to Redis is made again", call=name, why=str(error))
            pause = growing_delay(tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            if time.monotonic() + pause > began + within_s:
                raise DeadlineError(
                    f"{name}: Redis has failed for {within_s:g} s ({error})",
                    "see that it runs and has memory, then start this again",
                ) from error
            await asyncio.sleep(pause)
        else:
            if tries:
                after_s = round(time.monotonic() - began, 1)
                _log.info("a call to Redis was taken", call=name, tries=tries + 1, after_s=after_s)
            return answer
