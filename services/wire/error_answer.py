"""From a typed error to the body that a service answers, and back: the one place that clients of any room use."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from services.wire import errors
from services.wire.rollout_api import ErrorBody, ErrorDetail


def error_body(error: errors.RollmeshError) -> ErrorBody:
    """What a service answers for `error`."""
    return ErrorBody(error=ErrorDetail(message=str(error), type=error.kind, code=error.code))


class PromptTooLongError(errors.ContextLengthError):
    """A ContextLengthError as it comes back: the two lengths stand in the server's words only."""

    def __init__(self, what: str) -> None:
        errors.RollmeshError.__init__(self, what)


_KINDS: tuple[type[errors.RollmeshError], ...] = (
    errors.ConcludedError,
    errors.ConflictError,
    errors.DeadlineError,
    errors.DrainingError,
    errors.ForbiddenError,
    errors.NotFoundError,
    errors.NotReadyError,
    PromptTooLongError,
    errors.SessionConcludedError,
    errors.SessionExpiredError,
    errors.UnauthenticatedError,
    errors.UnsupportedParameterError,
    errors.UntrustedError,
    errors.UsageError,
    errors.WireError,
)
_BY_CODE = {kind.code: kind for kind in _KINDS} | {"schema": errors.UsageError}


def typed_error(
    call: str, status: int, retry_after: str | None, content: bytes, more: Iterable[type[errors.RollmeshError]] = ()
) -> errors.RollmeshError:
    """What the service meant by answering `call` with the error `status`; a RollmeshError for an answer not of ours.

    `retry_after`: that header, in seconds. `more`: further kinds that this service raises, told apart by their `code`.
    """
    try:
        detail = ErrorBody.model_validate_json(content).error
    except ValidationError:
        return errors.RollmeshError(f"{call} answered {status} with {content[:200]!r}, which is no error of ours")
    if detail.code == errors.CapacityError.code:
        return errors.CapacityError(f"{call}: {detail.message}", _seconds(retry_after))
    kinds = _BY_CODE | {kind.code: kind for kind in more}
    return kinds.get(detail.code, errors.RollmeshError)(f"{call} answered {status} ({detail.message})")


def _seconds(retry_after: str | None) -> float:
    """The header in seconds; a second for one that is missing, or a date, which only somebody in between would send."""
    try:
        return max(0.0, float(retry_after or 1.0))
    except ValueError:
        return 1.0
