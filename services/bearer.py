"""Keys shown as `Authorization: Bearer`."""

from __future__ import annotations

import hmac

from services.wire.errors import UnauthenticatedError


def bearer(authorization: str | None) -> str:
    """The key in a header's value; empty where it shows none."""
    scheme, _, shown = (authorization or "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def require_key(shown: str, key: str | None, remedy: str) -> None:
    """Raises UnauthenticatedError, with `remedy`, unless `shown` is `key`; None lets everybody in. In constant time."""
    if key is not None and not hmac.compare_digest(shown.encode(), key.encode()):
        raise UnauthenticatedError("no valid key", remedy)
