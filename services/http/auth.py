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
from services.security.permissions import OPENED_BY, AuthScope, Keys, openers, refusal
from services.wire.errors import RollmeshError

OPEN_PATHS = frozenset(("/livez", "/readyz", "/version", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"))
"""Without a key on purpose: whether a service lives, which one it is, and what its published code says anyway."""


class AuthMiddleware:
    """ASGI middleware. `sessions`: what looks like a session's key passes; the routes know whose it is."""

    def __init__(self, app: ASGIApp, authorizer: Authorizer, *, sessions: bool = False) -> None:
        self._app = app
        self._authorizer = authorizer
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
            self._authorizer.require_key(shown, "reading")


# Asks callers of an HTTP service for the key of the door that they stand before (`services.security.permissions`).

_schemes = {
    scope: HTTPBearer(auto_error=False, scheme_name=f"{scope}Key", description=f"By {', '.join(OPENED_BY[scope])} key")
    for scope in get_args(AuthScope)
}


class Authorizer:
    """Judges the callers of one service."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._keyless = not openers(keys, "reading")

    def require(self, authorization: str | None, scope: AuthScope) -> None:
        """Raises UnauthenticatedError or ForbiddenError for a header that does not open `scope`."""
        self.require_key(bearer(authorization), scope)

    def require_key(self, shown: str, scope: AuthScope) -> None:
        """As `require`, for the key alone."""
        if self._keyless:
            return
        refused = refusal(shown, self._keys, scope)
        if refused is not None:
            raise refused

    def of(self, scope: AuthScope) -> list[Any]:
        """For `dependencies=` of routes behind `scope`; it stands in their OpenAPI document."""

        async def check(request: Request) -> None:
            self.require(request.headers.get("authorization"), scope)

        return [Depends(check), Depends(_schemes[scope])]


# Keys shown as `Authorization: Bearer`.


def bearer(authorization: str | None) -> str:
    """The key in a header's value; empty where it shows none."""
    scheme, _, shown = (authorization or "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""
