"""Login of a browser: it shows a key once, and a cookie stands for it afterwards.

    POST /login {key} ──valid──► cookie (random, HttpOnly, SameSite=Strict) ──► each call: as if it had shown the key
    POST /logout ──► the cookie stands for nothing any more

The key itself is kept in this process's memory alone. A browser sends a cookie by itself, so a call with one must come from
this very page: what changes anything needs an `Origin` that is the address it was sent to. Without any key in the service
there is no login, and pages of elsewhere are kept out by the name that they call this address by (`SameAddress`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import SplitResult, urlsplit

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from services.http.app import error_answer
from services.http.auth import Authorizer
from services.security.permissions import AuthScope, is_loopback
from services.wire.errors import ForbiddenError, RollmeshError

COOKIE = "rollmesh-dashboard"
"""Its name goes on with the port: a browser sends a cookie to every port of a host."""
LOGIN_LASTS_S = 12 * 3600
MOST_LOGINS = 256
"""The oldest is forgotten past it."""
_SAFE = ("GET", "HEAD")


@dataclass(frozen=True)
class _Login:
    key: str
    until: float
    """Monotonic clock."""


class Logins:
    """Who has logged in: random token → the key that was shown. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logins: dict[str, _Login] = {}

    def open(self, key: str) -> str:
        """The token that stands for a valid key from now on."""
        now = self._clock()
        self._logins = {token: login for token, login in self._logins.items() if login.until > now}
        while len(self._logins) >= MOST_LOGINS:
            del self._logins[next(iter(self._logins))]
        token = secrets.token_urlsafe(32)
        self._logins[token] = _Login(key, now + LOGIN_LASTS_S)
        return token

    def close(self, token: str) -> None:
        """Nothing happens for a token that stands for nothing."""
        self._logins.pop(token, None)

    def key_of(self, token: str) -> str | None:
        """None for a token that was not given out, or that has run out."""
        login = self._logins.get(token)
        return login.key if login is not None and login.until > self._clock() else None


class CookieKeys:
    """ASGI middleware: a call with a login's cookie, and no key of its own, goes on as if it had shown the login's key.

    Raises nothing: a call that would change something from another page's address is answered 403 here.
    """

    def __init__(self, app: ASGIApp, logins: Logins) -> None:
        self._app, self._logins = app, logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _header(scope, b"authorization") is None:
            key = self._logins.key_of(token_of(scope))
            if key is not None:
                if scope["method"] not in _SAFE and not _same_origin(scope):
                    refused = ForbiddenError("this call comes from another page", "use the dashboard's own page")
                    await error_answer(refused)(scope, receive, send)
                    return
                shown = (b"authorization", f"Bearer {key}".encode("latin-1"))
                scope = {**scope, "headers": [*scope["headers"], shown]}
        await self._app(scope, receive, send)


class SameAddress:
    """ASGI middleware of a service without keys: it answers only to a name of loopback, and its page alone changes things.

    Else a page of anywhere, whose name is made to mean this machine, could read what needs no key here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: RollmeshError | None = None
        if scope["type"] == "http":
            host = _split(f"//{_header(scope, b'host') or ''}").hostname or ""
            if not is_loopback(host):
                refused = ForbiddenError(f"{host[:100]!r} is no name of loopback", "open the address that was printed")
            elif scope["method"] not in _SAFE and not _same_origin(scope):
                refused = ForbiddenError("this call comes from another page", "use the dashboard's own page")
        if refused is not None:
            await error_answer(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def cookie_of(scope: Scope) -> str:
    """The name of the cookie at the address that was called."""
    port = _port(_header(scope, b"host") or "")
    return COOKIE if port is None else f"{COOKIE}-{port}"


def token_of(scope: Scope) -> str:
    """The login's token among a call's cookies; empty where it has none."""
    try:
        found = SimpleCookie(_header(scope, b"cookie") or "").get(cookie_of(scope))
    except CookieError:
        return ""
    return "" if found is None else found.value


class ShownKey(BaseModel):
    """Body of `POST /login`."""

    key: str = Field(min_length=1, max_length=1000)


class Who(BaseModel):
    """What the caller's key allows. `keyless`: this service has no keys, and needs no login."""

    keyless: bool
    operator: bool


def login_routes(logins: Logins, authorizer: Authorizer, *, keyless: bool, secure: bool) -> APIRouter:
    """`POST /login`, which is open, `POST /logout` and `GET /api/who`. `secure`: the page is served over HTTPS."""
    router = APIRouter(tags=["login"])

    @router.post("/login", status_code=204)
    async def log_in(shown: ShownKey, request: Request) -> Response:
        """Show a key once; a cookie stands for it for 12 hours. 401 for a key that opens nothing here."""
        if not _same_origin(request.scope):
            raise ForbiddenError("this call comes from another page", "use the dashboard's own page")
        authorizer.require_key(shown.key, "reading")
        answer = Response(status_code=204)
        answer.set_cookie(
            cookie_of(request.scope),
            logins.open(shown.key),
            max_age=LOGIN_LASTS_S,
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return answer

    @router.post("/logout", status_code=204, dependencies=authorizer.of("reading"))
    async def log_out(request: Request) -> Response:
        """The login of the caller's cookie ends."""
        logins.close(token_of(request.scope))
        answer = Response(status_code=204)
        answer.delete_cookie(cookie_of(request.scope))
        return answer

    @router.get("/api/who", dependencies=authorizer.of("reading"))
    async def who(request: Request) -> Who:
        """What the page may offer."""
        return Who(keyless=keyless, operator=_grants(authorizer, request, "operator"))

    return router


def _grants(authorizer: Authorizer, request: Request, scope: AuthScope) -> bool:
    try:
        authorizer.require(request.headers.get("authorization"), scope)
    except RollmeshError:
        return False
    return True


def _same_origin(scope: Scope) -> bool:
    """Whether a call comes from a page of this address, or from no page at all: programs send no `Origin`."""
    origin = _header(scope, b"origin")
    return origin is None or _split(origin).netloc == _header(scope, b"host")


def _split(address: str) -> SplitResult:
    """What is no address has no parts."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _port(host: str) -> int | None:
    try:
        return urlsplit(f"//{host}").port
    except ValueError:
        return None


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for each, value in scope["headers"] if each == name), None)
