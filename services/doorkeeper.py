"""Asks callers of an HTTP service for the key of the door that they stand before (`services.key_rules`)."""

from __future__ import annotations

from typing import Any, get_args

from fastapi import Depends, Request
from fastapi.security import HTTPBearer

from services.bearer import bearer
from services.key_rules import OPENED_BY, Door, Keys, openers, refusal

_schemes = {
    door: HTTPBearer(auto_error=False, scheme_name=f"{door}Key", description=f"By {', '.join(OPENED_BY[door])} key")
    for door in get_args(Door)
}


class Doorkeeper:
    """Judges the callers of one service."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._keyless = not openers(keys, "reading")

    def require(self, authorization: str | None, door: Door) -> None:
        """Raises UnauthenticatedError or ForbiddenError for a header that does not open `door`."""
        self.require_key(bearer(authorization), door)

    def require_key(self, shown: str, door: Door) -> None:
        """As `require`, for the key alone."""
        if self._keyless:
            return
        refused = refusal(shown, self._keys, door)
        if refused is not None:
            raise refused

    def of(self, door: Door) -> list[Any]:
        """For `dependencies=` of routes behind `door`; it stands in their OpenAPI document."""

        async def check(request: Request) -> None:
            self.require(request.headers.get("authorization"), door)

        return [Depends(check), Depends(_schemes[door])]
