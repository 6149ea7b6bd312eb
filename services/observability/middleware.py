"""Tracing middleware (ASGI): a span for each HTTP call that belongs to a trace.

A call without a `traceparent` belongs to no trace, unless it opens a session or a group: that one begins a trace, so that
agents which know nothing of traces are in one too. The application sees this span's context in place of the caller's.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.observability.tracing import TRACEPARENT, Tracing

_HEADER = TRACEPARENT.encode()
_OPENING = ("/groups", "/sessions")
_RECORDED = "1", "3", "5", "7", "9", "b", "d", "f"
"""How the flags of a context end whose first bit says that it is recorded."""


def trace_calls(app: FastAPI, tracing: Tracing) -> None:
    """Nothing is added where traces are off. Middleware that is added later sees calls before."""
    if tracing.on:
        app.add_middleware(TracedCalls, tracing=tracing)


class TracedCalls:
    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = _parent(scope)
        if parent is None and scope["method"] == "POST" and scope["path"] in _OPENING:
            made = self._tracing.begin("opening", kind="server")
        elif parent is not None and parent.endswith(_RECORDED):
            made = self._tracing.span("call", parent=parent, kind="server")
        else:
            await self._app(scope, receive, send)
            return
        with made as span:
            status = 500

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            others = [header for header in scope["headers"] if header[0] != _HEADER]
            inner = {**scope, "headers": [*others, (_HEADER, span.context.encode())]}
            try:
                await self._app(inner, receive, watched)
            finally:
                span.note_call(scope["method"], _route(inner), status)


def _parent(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _HEADER:
            text: str = value.decode("latin-1")
            return text
    return None


def _route(scope: Scope) -> str:
    """The route's template where one took the call, for a path holds ids; else as much of the path as names no id."""
    route = scope.get("route")
    template = getattr(route, "path", None)
    if isinstance(template, str):
        return template
    parts = scope["path"].split("/")
    if len(parts) > 2 and parts[1] in ("groups", "sessions"):
        parts[2] = "{id}"
    return "/".join(parts)
