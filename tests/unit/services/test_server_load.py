"""What a gateway knows of a server's load: as of its last heartbeat, and what came and went through the gateway since."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from services.gateway.request import ProxiedCall
from services.gateway.servers import Server
from services.run_store.discovery import ServerRecord


def record(**changes: int) -> ServerRecord:
    return ServerRecord(name="s", url="http://127.0.0.1:1", state="serving", model="m", policy_version=0, **changes)  # type: ignore[arg-type]


@pytest.fixture
def generating() -> Iterator[ExitStack]:
    """Ends the calls in flight."""
    with ExitStack() as calls:
        yield calls


def start(server: Server, calls: ExitStack) -> None:
    call = ProxiedCall("POST", "/v1/completions", "/v1/completions", [], b"", "c", "s", None)
    calls.enter_context(server.trying(asyncio.timeout(None), call))


def test_sessions_that_ended_before_the_record_was_read_count_since_the_heartbeat() -> None:
    server = Server(record())
    server.sessions_changed(16)
    heartbeat = time.monotonic()
    server.sessions_changed(-10)
    server.renew(record(open_sessions=16), heartbeat)
    assert server.sessions == 6
    server.sessions_changed(3)
    assert server.sessions == 9
    # Read once more, with nothing new in it.
    server.renew(record(open_sessions=16), heartbeat)
    assert server.sessions == 9
    server.renew(record(open_sessions=9), time.monotonic())
    assert server.sessions == 9


def test_other_gateways_sessions_are_known_by_heartbeats_and_none_is_counted_below_nothing() -> None:
    server = Server(record())
    server.renew(record(open_sessions=5), time.monotonic())
    server.sessions_changed(1)
    assert server.sessions == 6
    heartbeat = time.monotonic()
    server.sessions_changed(-1)
    server.renew(record(open_sessions=0), heartbeat)
    assert server.sessions == 0


async def test_calls_that_ended_before_the_record_was_read_count_since_the_heartbeat(generating: ExitStack) -> None:
    server = Server(record())
    for _ in range(4):
        start(server, generating)
    # Another gateway has three calls there.
    heartbeat = time.monotonic()
    generating.close()
    server.renew(record(running=6, waiting=1), heartbeat)
    assert (server.in_flight, server.busy) == (0, 3)
    start(server, generating)
    assert (server.in_flight, server.busy) == (1, 4)
