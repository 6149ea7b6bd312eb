"""The threshold of a service: whoever shows no key at all comes no further, whatever the route, and no body is read.

Which key opens which route is judged behind it (`services.doorkeeper`); a route that forgot to ask is still no open door.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from services.app import error_answer
from services.bearer import bearer
from services.doorkeeper import Doorkeeper
from services.session_keys import PREFIX
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
