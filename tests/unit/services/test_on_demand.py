"""A service that starts when somebody calls it, and what a page's looks may cost."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import httpx

from services.dashboard.look.pace import LEAST_S, MOST_S, SHARE, pause_after
from services.dashboard.look.restarts import Restart, Restarts
from services.supervisor.on_demand import run_on_demand
from services.supervisor.processes import ManagedProcess, ProcessSpec, Reaper
from tests.conftest import free_port
from tests.support.until import until

SERVER = """
import http.server, socket, sys
listener = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
server = http.server.HTTPServer(listener.getsockname(), http.server.SimpleHTTPRequestHandler, bind_and_activate=False)
server.socket.close()
server.socket = listener
server.serve_forever()
"""


async def test_a_process_starts_with_the_first_call_which_it_answers(tmp_path: Path) -> None:
    said: list[str] = []
    port = free_port()
    async with Reaper(tmp_path / "shm") as reaper:
        spec = ProcessSpec("page", (sys.executable, "-c", SERVER))
        managed = ManagedProcess(spec, tmp_path, reaper, said.append)
        running = asyncio.create_task(run_on_demand(managed, port, said.append, asyncio.Event()))
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as http:

                async def answers() -> bool:
                    try:
                        return (await http.get("/")).status_code == 200
                    except httpx.ConnectError:
                        return False

                await until(lambda: running.done() or _listens(port), 10.0)
                assert managed.child is None, "nobody has called"
                await until(answers, 20.0)
                first = managed.child
                assert first is not None
                first.kill()
                await until(lambda: managed.child is not first, 20.0)
                assert (await http.get("/")).status_code == 200, "callers wait for the next one"
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await managed.stop(5.0)


async def test_a_process_starts_without_a_call_once_there_is_time_for_it(tmp_path: Path) -> None:
    said: list[str] = []
    port, at_last = free_port(), asyncio.Event()
    async with Reaper(tmp_path / "shm") as reaper:
        managed = ManagedProcess(ProcessSpec("page", (sys.executable, "-c", SERVER)), tmp_path, reaper, said.append)
        running = asyncio.create_task(run_on_demand(managed, port, said.append, at_last))
        try:
            await until(lambda: running.done() or _listens(port), 10.0)
            assert managed.child is None, "nobody has called"
            at_last.set()
            await until(lambda: managed.child is not None, 10.0)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as http:
                assert (await http.get("/")).status_code == 200
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await managed.stop(5.0)


async def test_what_it_is_for_goes_on_where_its_port_is_taken(tmp_path: Path) -> None:
    said: list[str] = []
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    async with taken, Reaper(tmp_path / "shm") as reaper:
        managed = ManagedProcess(ProcessSpec("page", (sys.executable,)), tmp_path, reaper, said.append)
        await run_on_demand(managed, port, said.append, asyncio.Event())
    assert len(said) == 1 and f"127.0.0.1:{port}" in said[0] and said[0].endswith("the run goes on without it")


def test_looks_that_cost_more_come_more_seldom_but_never_too_late() -> None:
    assert pause_after(0.0) == LEAST_S
    assert pause_after(0.008) == 0.008 / SHARE
    assert pause_after(10.0) == MOST_S < 3.0


def test_a_service_that_is_back_before_it_was_missed_is_told_for_a_minute() -> None:
    restarts = Restarts()
    assert restarts.look({"gateway": "a", "s0": "x"}, 0.0) == []
    assert restarts.look({"gateway": "b", "s0": "x"}, 2.0) == [Restart("gateway", 2.0)]
    assert restarts.look({"s0": "x"}, 61.0) == [Restart("gateway", 2.0)], "one that is away now is told elsewhere"
    assert restarts.look({"gateway": "b", "s0": "x"}, 62.0) == []


def _listens(port: int) -> bool:
    """Whether the port is taken, found without calling it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False
