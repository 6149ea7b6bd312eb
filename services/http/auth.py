"""The threshold of a service: whoever shows no key at all comes no further, whatever the route, and no body is read.

Which key opens which route is judged behind it (`services.http.auth`); a route that forgot to ask is still no open door.
"""

from __future__ import annotations

from typing import Any, get_args

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http.app import error_answer
from services.security.keys import PREFIX
from services.security.permissions import OPENED_BY, Door, Keys, openers, refusal
from services.wire.errors import RollmeshError

OPEN_PATHS = frozenset(("/livez", "/readyz", "/version", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"))
"""Without a key on purpose: whether a service lives, which one it is, and what its published code says anyway."""


class Threshold:
    """ASGI middleware. `sessions`: what looks like a session's key passes; the routes know whose it is."""

    def __init__(self, app: ASGIApp, doors: Doorkeeper, *, sessions: bool = False) -> None:
        self._app = app
        self._doors = doors
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_PATHS:
            try:
                self._check(scope)
            except RollmeshError as error:
                await error_answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        shown = bearer(header.decode("latin-1"))
        if not (self._sessions and shown.startswith(PREFIX)):
            # The door that every bearer opens.
            self._doors.require_key(shown, "reading")


# Asks callers of an HTTP service for the key of the door that they stand before (`services.security.permissions`).

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


# Keys shown as `Authorization: Bearer`.


def bearer(authorization: str | None) -> str:
    """The key in a header's value; empty where it shows none."""
    scheme, _, shown = (authorization or "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""
