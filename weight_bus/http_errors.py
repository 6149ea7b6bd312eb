"""From an error answer of a service back to the typed error that it raised."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from services.wire.errors import (
    CapacityError,
    ConcludedError,
    ConflictError,
    DeadlineError,
    NotFoundError,
    NotReadyError,
    RollmeshError,
    UsageError,
    WireError,
)
from services.wire.rollout_api import ErrorBody
from weight_bus.errors import StageError, TransportError

_BY_CODE: dict[str, type[RollmeshError]] = {
    kind.code: kind
    for kind in (
        ConcludedError,
        ConflictError,
        DeadlineError,
        NotFoundError,
        NotReadyError,
        StageError,
        TransportError,
        UsageError,
        WireError,
    )
}


def raise_for_error(response: httpx.Response) -> None:
    """Raise what the service meant, if it answered an error; an answer without an ErrorBody is a RollmeshError."""
    if response.is_success:
        return
    try:
        detail = ErrorBody.model_validate_json(response.content).error
    except ValidationError:
        raise RollmeshError(f"{response.request.url} answered {response.status_code} {response.text[:200]!r}") from None
    if detail.code == CapacityError.code:
        raise CapacityError(detail.message, float(response.headers.get("Retry-After", 1)))
    raise _BY_CODE.get(detail.code, RollmeshError)(detail.message)
