"""Error answers of the bus and of the engines' weight routes as typed errors."""

from __future__ import annotations

import httpx

from services.wire.errors import typed_error
from weight_bus.errors import StageError, TransportError


def raise_for_error(response: httpx.Response) -> None:
    """Raise what the service meant, if it answered an error."""
    if response.is_success:
        return
    call, retry_after = str(response.request.url), response.headers.get("Retry-After")
    raise typed_error(call, response.status_code, retry_after, response.content, (StageError, TransportError))
