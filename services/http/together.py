"""Several applications in one process, each on a port of its own, such as one for each run.

SIGTERM, Ctrl-C ──► all end
one's own end   ──► the others go on; its failure is raised when the last has ended
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from services.host.process import collect_seldom
from services.http.app import SHUTDOWN_S, Stop, make_server
from services.security.tls import Identity

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = structlog.get_logger()


@dataclass(frozen=True)
class Served:
    """`run_id`: named in its lines of the log. `listener`: bound already. `identity`: as in `make_server`."""

    run_id: str
    app: FastAPI
    listener: socket.socket
    stop: Stop
    identity: Identity | None = None


def serve_together(services: Sequence[Served], *, shutdown_s: int = SHUTDOWN_S) -> None:
    """Run all until SIGTERM, Ctrl-C or `stop.fail` of each. Raises the first failure when all have ended."""
    collect_seldom()  # what was imported stays for good
    servers = [
        make_server(each.app, each.stop, shutdown_s=shutdown_s, identity=each.identity, takes_signals=False)
        for each in services
    ]
    failed: list[Served] = []

    async def run(each: Served, server: uvicorn.Server) -> None:
        structlog.contextvars.bind_contextvars(run=each.run_id)
        await server.serve(sockets=[each.listener])
        if each.stop.failure is not None:
            failed.append(each)
            _log.error("this run's server has ended, others go on", why=str(each.stop.failure))

    async def run_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for each, server in zip(services, servers, strict=True):
                tasks.create_task(run(each, server), name=f"server of {each.run_id}")

    with _ended_by_signals(servers), asyncio.Runner(loop_factory=servers[0].config.get_loop_factory()) as runner:
        runner.run(run_all())
    if failed and failed[0].stop.failure is not None:
        raise failed[0].stop.failure


@contextmanager
def _ended_by_signals(servers: Sequence[uvicorn.Server]) -> Iterator[None]:
    """As uvicorn ends one server: gracefully, at a second Ctrl-C at once; afterwards the signal has its usual effect."""
    caught: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        for server in servers:
            server.force_exit = server.should_exit and number == signal.SIGINT and number in caught
            server.should_exit = True
        caught.append(number)

    before: dict[int, Any] = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in reversed(caught):
        signal.raise_signal(number)
