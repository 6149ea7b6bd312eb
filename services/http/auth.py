"""Authentication of HTTP services: a middleware that refuses callers without any valid key, and a check of scope per route.

The middleware runs before a body is read and for every route, so that a route that declares no scope still needs a key,
and who has none makes nobody read what it sends.
Which key grants which scope: `services.security.permissions`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from typing import Any, get_args

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http.app import METRICS_PATH, error_answer
from services.http.connection import caller_is_known
from services.security.keys import PREFIX
from services.security.permissions import OPENED_BY, AuthScope, Keys, is_keyless, refusal
from services.wire.errors import RollmeshError, UnauthenticatedError

OPEN_PATHS = frozenset(("/livez", "/readyz", "/version", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"))
"""Open to all on purpose: probes, the version, and documents that are the same for every installation."""
NOT_ISSUED = ("this session key is not one of this run", "use the api_key of POST /sessions")
"""Why a session key is refused, and the remedy."""


SessionKeyCheck = Callable[[str], Awaitable[bool]]
"""Whether a session key is one that this run has issued. Raises NotReadyError where that cannot be known yet."""


class AuthMiddleware:
    """ASGI middleware. `issued`: session keys of this run pass, and which session they open is checked by the routes.

    `also_open`: paths of this service that need no key, such as its login.
    """

    def __init__(
        self,
        app: ASGIApp,
        authorizer: Authorizer,
        *,
        issued: SessionKeyCheck | None = None,
        also_open: Set[str] = frozenset(),
    ) -> None:
        self._app = app
        self._authorizer = authorizer
        self._issued = issued
        self._open = OPEN_PATHS | also_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in self._open:
            try:
                await self._check(scope)
            except RollmeshError as error:
                await error_answer(error)(scope, receive, send)
                return
            caller_is_known(scope)
        await self._app(scope, receive, send)

    async def _check(self, scope: Scope) -> None:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        shown = bearer(header.decode("latin-1"))
        if self._issued is not None and shown.startswith(PREFIX):
            if not await self._issued(shown):
                raise UnauthenticatedError(*NOT_ISSUED)
        else:
            # Every other key grants the reading scope.
            self._authorizer.require_key(shown, "metrics" if scope["path"] == METRICS_PATH else "reading")


_schemes = {
    scope: HTTPBearer(auto_error=False, scheme_name=f"{scope}Key", description=f"By {', '.join(OPENED_BY[scope])} key")
    for scope in get_args(AuthScope)
}


class Authorizer:
    """Checks whether a caller's key grants the scope of a route of one service."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._keyless = is_keyless(keys)

    def require(self, authorization: str | None, scope: AuthScope) -> None:
        """Raises UnauthenticatedError or ForbiddenError for a header whose key does not grant `scope`."""
        self.require_key(bearer(authorization), scope)

    def require_key(self, shown: str, scope: AuthScope) -> None:
        """As `require`, for the key alone."""
        if self._keyless:
            return
        refused = refusal(shown, self._keys, scope)
        if refused is not None:
            raise refused

    def of(self, scope: AuthScope) -> list[Any]:
        """For `dependencies=` of routes that need `scope`; it shows in their OpenAPI document."""

        async def check(request: Request) -> None:
            self.require(request.headers.get("authorization"), scope)

        return [Depends(check), Depends(_schemes[scope])]


def bearer(authorization: str | None) -> str:
    """The key in an `Authorization: Bearer` header's value; empty where it has none."""
    scheme, _, shown = (authorization or "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""
