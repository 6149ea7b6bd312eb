"""The page's own files: served from the package, with the headers that keep a browser from doing anything else with them.

Nothing of the page comes from elsewhere, nothing in it is made of text, and no other page may hold it in a frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.wire.errors import NotFoundError

FOLDER = Path(__file__).parent / "page"
LOGIN_FILES = frozenset(("login.html", "login.js", "base.css", "icon.svg"))
"""All that is shown without a key."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No text becomes HTML: where a script would make some, the browser refuses.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=()",
    }
)
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
        ".LICENSE": "text/plain; charset=utf-8",
    }
)


class PageHeaders:
    """ASGI middleware: every answer carries `HEADERS`, and is kept by no cache unless it says otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers)


@dataclass(frozen=True)
class PageFile:
    """`tag`: changes with the bytes."""

    content: bytes
    media_type: str
    tag: str


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Path below the folder, with slashes → the file. All are small, and are read once."""
    found = {}
    for path in sorted(folder.rglob("*")):
        media_type = _TYPES.get(path.suffix)
        if path.is_file() and media_type is not None:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = PageFile(content, media_type, tag)
    return found


def page_routes(files: Mapping[str, PageFile]) -> APIRouter:
    """`GET /`, `/login` and `/page/…`. Which of them are open is said where the application is made."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index(request: Request) -> Response:
        return _answer(files["index.html"], request)

    @router.get("/login")
    async def login(request: Request) -> Response:
        return _answer(files["login.html"], request)

    @router.get("/page/{path:path}")
    async def page(path: str, request: Request) -> Response:
        found = files.get(path)
        if found is None:
            raise NotFoundError(f"the page has no file {path[:100]!r}", "open /")
        return _answer(found, request)

    return router


def _answer(file: PageFile, request: Request) -> Response:
    # Asked for each time, and answered without its bytes where the browser has them.
    headers = {"etag": file.tag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
