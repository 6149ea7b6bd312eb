"""An application on a free port of loopback, within the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.http.app import Stop, make_server, open_port
from services.http.connection import BOUNDS, Bounds
from services.security.tls import Identity
from tests.support.until import until


@asynccontextmanager
async def served(
    app: FastAPI, stop: Stop | None = None, *, identity: Identity | None = None, bounds: Bounds = BOUNDS
) -> AsyncIterator[str]:
    """Gives its URL. `stop`: the one that the application was made with; `identity`: what it shows, over HTTPS."""
    listener = open_port("127.0.0.1", 0)
    server = make_server(app, stop or Stop(), shutdown_s=1, identity=identity, bounds=bounds)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve([listener]))
    try:
        await until(lambda: server.started, 10.0)
        yield f"{'http' if identity is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
