"""The gateway, or the environment itself, is killed while a runner plays: the run goes on in seconds, nothing is lost.

Every idle time and lease is the default: what is not taken up or given up at once would stand for minutes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from clients.environments.registry import make_environment
from clients.rollout.client import RolloutClient
from clients.runner.evaluation import Terms
from clients.runner.lease import Lease, new_runner
from clients.runner.runner import RunnerPlan, run_environment
from clients.runner.tasks import PlayedTask
from services.run_store.runners import RunnerRegistry
from services.security.tls import PUBLIC
from services.wire.errors import ConflictError, UsageError
from tests.conftest import free_port
from tests.support.committing import commit
from tests.support.mesh_command import COMMAND
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until

BATCH, OPEN = 4, 12
IN_SECONDS = 12.0
"""For a machine that does much else; idle times are 20 s and more."""


@asynccontextmanager
async def process(log: Path, *arguments: str, folder: Path | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=out, stderr=out, cwd=folder)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


@asynccontextmanager
async def training(hosts: list[Host]) -> AsyncIterator[None]:
    """A new version for each batch of groups that was played, as a trainer would publish them."""

    async def train() -> None:
        version = 0
        while True:
            if await played(hosts[0]) // BATCH > version:
                version += 1
                for host in hosts:
                    await commit(host, version)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(train())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def played(host: Host) -> int:
    accounts = await host.ledger.accounts()
    return accounts.closed_groups - accounts.dropped_groups


def tail(log: Path) -> str:
    return log.read_text()[-4000:] if log.is_file() else ""


async def plays_on(host: Host, log: Path, deadline_s: float = IN_SECONDS) -> None:
    """All that admission lets in is played once over."""
    before = await played(host)

    async def more() -> bool:
        return await played(host) >= before + OPEN

    try:
        await until(more, deadline_s)
    except TimeoutError:
        raise AssertionError(f"{await played(host) - before} groups were played\n{tail(log)}") from None


async def test_a_killed_gateway_and_a_killed_environment_cost_seconds(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    log, port = tmp_path / "environment.log", free_port()
    url = f"http://127.0.0.1:{port}"
    gateway = ["gateway", "--run-id", run_id, "--redis-url", redis_url, "--port", str(port)]
    environment = ["run-environment", "--run-id", run_id, "--task", "running-sums", "--rollout-url", url]
    environment += ["--run-dir", str(tmp_path), "--group-size", "2", "--evaluation-problems", "2", "--name", "env"]
    environment += ["--concurrency", str(OPEN)]
    settings = small_batch(k=2, batch=BATCH)
    # So that a gateway which is slow to start is in time for the answer that it breaks off.
    settings.rollout.retry_patience_s = 60.0
    async with AsyncExitStack() as stack:
        hosts = [
            await stack.enter_async_context(
                hosting(
                    ScriptedEngine(answer_length=3, step_s=0.2),
                    redis_url=redis_url,
                    run_id=run_id,
                    model=tiny_policy,
                    settings=settings,
                    server_id=f"s{number}",
                )
            )
            for number in range(2)
        ]
        host = hosts[0]
        await stack.enter_async_context(training(hosts))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20.0))
        async with process(tmp_path / "gateway.log", *gateway) as killed:
            playing = await stack.enter_async_context(process(log, *environment))
            await plays_on(host, log, 60.0)
            session = (await http.post("/sessions", json={"purpose": "evaluate"})).json()["session_id"]
            asked = httpx.Request(
                "POST",
                f"{url}/sessions/{session}/v1/completions",
                json={"prompt": "12=", "max_tokens": 8, "stream": True},
                headers={"Idempotency-Key": "mine"},
            )
            broken = await http.send(asked, stream=True)
            chunks = broken.aiter_bytes()
            seen = await anext(chunks)
            killed.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                async for chunk in chunks:
                    seen += chunk
            await killed.wait()
        await stack.enter_async_context(process(tmp_path / "gateway.log", *gateway))
        await until(lambda: _answers(http), 60.0)
        whole = await http.send(asked)
        assert whole.content.startswith(seen) and len(whole.content) > len(seen)
        assert (await http.get(f"/sessions/{session}")).json()["calls"] == 1, "it was sampled once"
        await plays_on(host, log)
        assert playing.returncode is None
        assert (await host.ledger.accounts()).dropped_groups == 0
        assert "group lost" not in tail(log)

        runners = RunnerRegistry(host.redis, run_id)
        before = (await runners.heard())["env"].incarnation
        for each in hosts:
            (await each.http.post("/pause?mode=keep")).raise_for_status()

        await until(lambda: _open(host, OPEN), 20.0)
        playing.send_signal(signal.SIGKILL)
        await playing.wait()
        for each in hosts:
            (await each.http.post("/resume")).raise_for_status()
        await stack.enter_async_context(process(log, *environment))

        async def joined() -> bool:
            return (await runners.heard())["env"].incarnation != before

        await until(joined, 60.0)
        await plays_on(host, log)
        accounts = await host.ledger.accounts()
        assert accounts.dropped_groups == OPEN
        trajectories = await host.published()
    ids = [trajectory.trajectory_id for trajectory in trajectories]
    assert len(set(ids)) == len(ids)


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


def plan_for(run_dir: Path) -> RunnerPlan:
    return RunnerPlan(
        tasks=[PlayedTask(make_environment("running-sums"), max_tokens=8)],
        seed=5,
        group_size=2,
        concurrency=4,
        evaluation=Terms(2),
        run_dir=run_dir,
        start_deadline_s=20.0,
    )


async def test_a_runner_whose_name_is_taken_ends_and_says_why(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    settings = small_batch(k=50, batch=4)
    settings.rollout.runner_lease_s = 1.0
    plan = replace(plan_for(tmp_path), name="mine")
    engine = ScriptedEngine(answer_length=3, step_s=0.05)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings) as host:
        running = asyncio.create_task(run_environment([host.url], plan))
        await until(lambda: _played_some(host), 20.0)
        async with RolloutClient(host.url) as client, Lease(new_runner("mine"), [client], None, PUBLIC):
            with pytest.raises(ConflictError, match="runner mine has left the run, or is another process now"):
                await asyncio.wait_for(running, 10.0)
        # The other has left too, and nobody's groups are open.
        await until(lambda: _none_open(host), 10.0)
    with pytest.raises(UsageError, match="'a b' is no name of a runner"):
        new_runner("a b")


async def _played_some(host: Host) -> bool:
    return await played(host) > 2


async def _none_open(host: Host) -> bool:
    return (await host.report())["open_groups"] == 0


class Door:
    """Passes connections on to a server; while it is shut all are closed, new ones too."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._through: set[asyncio.StreamWriter] = set()
        self._shut = False

    def shut(self) -> None:
        self._shut = True
        for writer in self._through:
            writer.transport.abort()

    def open(self) -> None:
        self._shut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._shut:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        both = {writer, up_writer}
        self._through |= both
        try:
            await asyncio.gather(_pass_on(reader, up_writer), _pass_on(up_reader, writer))
        finally:
            self._through -= both


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_groups_that_an_outage_outlasts_are_aborted_as_soon_as_it_is_over(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine(answer_length=3, step_s=0.05)
    async with hosting(
        engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=small_batch(k=50, batch=4)
    ) as host:
        door = Door(host.url)
        async with await asyncio.start_server(door.serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            with capture_logs() as logs:
                plan = replace(plan_for(tmp_path), patience_s=0.3, retries=1000)
                running = asyncio.create_task(run_environment([url], plan))
                try:
                    await until(lambda: _played_some(host), 20.0)
                    (await host.http.post("/pause?mode=keep")).raise_for_status()
                    await until(lambda: engine.status().running == 4, 20.0)
                    door.shut()
                    await until(lambda: sum(line["event"] == "group lost" for line in logs) >= 4, 20.0)
                    lost = set(await host.ledger.open_groups())
                    assert len(lost) == 4
                    (await host.http.post("/resume")).raise_for_status()
                    door.open()
                    await until(lambda: _none_of(host, lost), IN_SECONDS)
                    await plays_on(host, tmp_path)
                finally:
                    door.open()
                    running.cancel()
                    with suppress(asyncio.CancelledError):
                        await running
            await until(lambda: _none_open(host), 10.0)


async def _open(host: Host, groups: int) -> bool:
    return len(await host.ledger.open_groups()) == groups


async def _none_of(host: Host, group_ids: set[str]) -> bool:
    return not group_ids & set(await host.ledger.open_groups())


class LeaseServer(ThreadingHTTPServer):
    """Grants leases of half a second in threads of its own; keeps the paths that were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Granting)


class _Granting(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, LeaseServer)
        server.asked.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"lease_s": 0.5}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not into the test's output."""


async def test_a_lease_is_renewed_while_the_environments_code_holds_the_event_loop_up() -> None:
    with LeaseServer() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            async with RolloutClient(f"http://127.0.0.1:{server.server_port}") as client:
                async with Lease(new_runner(None), [client], None, PUBLIC):
                    ends = time.monotonic() + 20.0
                    while server.asked.count("/runners/heartbeat") < 4 and time.monotonic() < ends:
                        time.sleep(0.05)  # noqa: ASYNC251 - as an environment does that computes
        finally:
            server.shutdown()
            serving.join()
    assert server.asked[0] == "/runners"
    assert server.asked.count("/runners/heartbeat") >= 4
    assert server.asked[-1] == "/runners/leave" or "/runners/leave" in server.asked[-2:]
