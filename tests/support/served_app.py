"""An application on a free port of loopback, within the test's own event loop, and what a client of it trusts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import httpx
from fastapi import FastAPI

from services.http.app import Stop, make_server, open_port
from services.http.connection import BOUNDS, Bounds
from services.security.tls import Identity, Trust
from tests.support.until import until


@asynccontextmanager
async def served(
    app: FastAPI, stop: Stop | None = None, *, identity: Identity | None = None, bounds: Bounds = BOUNDS
) -> AsyncIterator[str]:
    """Gives its URL. `stop`: the one that the application was made with; `identity`: what it shows, over HTTPS."""
    listener = open_port("127.0.0.1", 0)
    server = make_server(app, stop or Stop(), shutdown_s=1, identity=identity, bounds=bounds, takes_signals=False)
    task = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started, 10.0)
        yield f"{'http' if identity is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def context_of(trust: Trust) -> ssl.SSLContext:
    return trust.verify if isinstance(trust.verify, ssl.SSLContext) else _public_context()


@cache
def _public_context() -> ssl.SSLContext:
    """One for all tests: each would read the authorities of the whole world anew, a fifth of a server's start."""
    return httpx.create_ssl_context()
