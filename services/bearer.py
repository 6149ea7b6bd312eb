"""Keys shown as `Authorization: Bearer`."""

from __future__ import annotations


def bearer(authorization: str | None) -> str:
    """The key in a header's value; empty where it shows none."""
    scheme, _, shown = (authorization or "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""
