"""Which failed calls are sent again, and when: one rule for both clients.

Repeated, with back-off, until the client's patience is over: connections that could not be made or broke, 429 (after its
Retry-After) and 503. What a call does is done once, however often it is sent (`clients.calls`).
"""

from __future__ import annotations

from tenacity import RetryCallState, wait_random_exponential

from services.wire.errors import CapacityError, NotReadyError, RollmeshError

_FIRST_PAUSE_S = 0.02
_back_off = wait_random_exponential(multiplier=0.05, max=0.3)


class ServerUnreachableError(RollmeshError):
    """No connection, or one that broke. `sent`: the request may have arrived and been carried out."""

    status = 502
    code = "unreachable"

    def __init__(self, url: str, why: str, *, sent: bool) -> None:
        super().__init__(f"{url} cannot be reached ({why})", "see whether it runs and is ready")
        self.sent = sent


def worth_repeating(error: BaseException) -> bool:
    """Whether a call that failed with `error` is sent again."""
    return isinstance(error, ServerUnreachableError | CapacityError | NotReadyError)


def first_pause_s(error: RollmeshError) -> float:
    """How long to wait before the second attempt."""
    return error.retry_after_s if isinstance(error, CapacityError) else _FIRST_PAUSE_S


def pause(state: RetryCallState) -> float:
    """How long tenacity waits before each later attempt."""
    error = state.outcome.exception() if state.outcome is not None else None
    return error.retry_after_s if isinstance(error, CapacityError) else _back_off(state)
