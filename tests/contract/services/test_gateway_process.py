"""`rollmesh gateway` as a process: it starts, ends politely, and refuses what cannot be in one line."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from services.run_store.client import connect
from services.run_store.discovery import ServiceRegistry
from tests.conftest import free_port
from tests.support.fake_servers import fake_servers
from tests.support.mesh_command import COMMAND, run_command
from tests.support.until import until


@contextmanager
def gateway_process(redis_url: str, run_id: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    flags = ["--run-id", run_id, "--redis-url", redis_url, "--port", str(port)]
    process = subprocess.Popen([*COMMAND, "gateway", *flags], stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=10)


async def test_what_is_in_flight_is_answered_before_the_process_ends(redis_url: str, run_id: str) -> None:
    redis = connect(redis_url)
    try:
        async with fake_servers("a", ServiceRegistry(redis, run_id)) as (server,):
            with gateway_process(redis_url, run_id) as (process, url):
                async with httpx.AsyncClient(base_url=url, timeout=20.0) as http:

                    async def ready() -> bool:
                        try:
                            return (await http.get("/readyz")).status_code == 200
                        except httpx.TransportError:
                            return False

                    await until(ready, deadline_s=20.0)
                    session = (await http.post("/sessions", json={})).json()["session_id"]
                    server.hold.clear()
                    chat = f"/sessions/{session}/v1/chat/completions"
                    waiting = asyncio.create_task(http.post(chat, json={"messages": []}))
                    await until(lambda: len(server.seen) == 2)
                    process.send_signal(signal.SIGTERM)

                    async def refuses() -> bool:
                        try:
                            await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                        except ConnectionError:
                            return True
                        return False

                    await until(refuses)
                    assert process.poll() is None
                    server.hold.set()
                    assert (await waiting).json()["server"] == "a"
                    await until(lambda: process.poll() is not None, deadline_s=10.0)
    finally:
        await redis.aclose()


def test_misuse_is_one_line_and_exit_code_2(redis_url: str) -> None:
    flags = ["gateway", "--run-id", "r", "--port", str(free_port())]
    for more in (
        ["--redis-url", f"redis://127.0.0.1:{free_port()}/0"],
        ["--redis-url", redis_url, "--host", "0.0.0.0"],
    ):
        done = run_command([*flags, *more])
        assert (done.code, len(done.err.strip().splitlines())) == (2, 1), done.err
