"""The weight bus over real sockets: engines register, versions are published, everybody flips together."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

torch = pytest.importorskip("torch")

from services.http.app import open_port  # noqa: E402
from services.wire.errors import ConflictError, DeadlineError, NotFoundError, WireError  # noqa: E402
from tests.conftest import free_port, wait_for_port  # noqa: E402
from tests.weight_parts import PlainTarget, SmallEngine, eventually, make_weights, served  # noqa: E402
from weight_bus.client.bus_client import BusClient  # noqa: E402
from weight_bus.coordinator.app import build_app  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

LEASE_S = 0.5


class Mesh:
    """A bus, a publisher and as many engines as a test adds. Engines beat when the test says so."""

    def __init__(self, run_id: str, stack: AsyncExitStack, publisher: Publisher) -> None:
        self.run_id = run_id
        self.publisher = publisher
        self.journal: list[str] = []
        self.engines: dict[str, SmallEngine] = {}
        self.urls: dict[str, str] = {}
        self.bus: BusClient
        self._stack = stack

    async def start(self, *, stage_timeout_s: float = 5.0, lease_s: float = LEASE_S) -> None:
        url = await self._stack.enter_async_context(served(build_app(self.run_id, stage_timeout_s, lease_s=lease_s)))
        self.bus = await self._stack.enter_async_context(BusClient(url, self.run_id, deadline_s=2.0))

    async def add(self, name: str) -> SmallEngine:
        engine = SmallEngine(name, Receiver(PlainTarget(make_weights(0)), self.run_id, [ShmReader()]), self.journal)
        self._stack.callback(engine.receiver.close)
        self.urls[name] = await self._stack.enter_async_context(served(engine.app()))
        self._stack.callback(engine.go_on.set)
        self.engines[name] = engine
        await self.beat(name)
        return engine

    async def beat(self, name: str) -> None:
        await self.bus.register(name, self.urls[name], self.engines[name].receiver.version)

    async def publish(self, version: int) -> str:
        manifest = self.publisher.publish(version, make_weights(version)).manifest()
        await self.bus.announce(manifest)
        return manifest.root_digest


@pytest.fixture
def publisher(run_id: str) -> Iterator[Publisher]:
    publisher = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), 256)
    yield publisher
    publisher.close()


@pytest.fixture
async def mesh(run_id: str, publisher: Publisher) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        mesh = Mesh(run_id, stack, publisher)
        await mesh.start()
        yield mesh


async def test_all_engines_stage_before_any_of_them_flips(mesh: Mesh) -> None:
    await mesh.add("a")
    await mesh.add("b")
    digest = await mesh.publish(1)
    update = await mesh.bus.wait_settled(1, 5)
    assert update.state == "committed"
    assert update.publish_to_commit_ms is not None
    assert update.root_digest == digest
    assert {call.split()[1] for call in mesh.journal[:2]} == {"staged"}
    assert {call.split()[1] for call in mesh.journal[2:]} == {"committed"}
    assert {engine.state for engine in update.engines} == {"committed"}
    assert all(engine.bytes_read == mesh.publisher.layout.total_bytes for engine in update.engines)
    verified = await mesh.bus.verify()
    assert verified.match
    assert [engine.root_digest for engine in verified.engines] == [digest, digest]


async def test_many_versions_in_a_row_are_all_served(mesh: Mesh) -> None:
    engine = await mesh.add("a")
    for version in range(1, 6):
        view = await mesh.bus.announce(mesh.publisher.publish(version, make_weights(version)).manifest(), wait_s=5)
        assert (view.version, view.state) == (version, "committed")
    assert engine.receiver.version == 5
    assert (await mesh.bus.engines()).engines[0].policy_version == 5


async def test_an_engine_that_cannot_stage_keeps_its_version_and_the_others_go_on(mesh: Mesh) -> None:
    good = await mesh.add("good")
    bad = await mesh.add("bad")
    bad.receiver._run_id = "another-run"
    await mesh.publish(1)
    update = await mesh.bus.wait_settled(1, 5)
    progress = {engine.engine_id: engine for engine in update.engines}
    assert update.state == "committed"
    assert progress["bad"].state == "failed"
    assert "another-run" in (progress["bad"].why or "")
    assert (good.receiver.version, bad.receiver.version) == (1, 0)
    verified = await mesh.bus.verify()
    assert not verified.match


async def test_an_engine_that_hangs_is_given_up_after_the_time_out(run_id: str, publisher: Publisher) -> None:
    async with AsyncExitStack() as stack:
        mesh = Mesh(run_id, stack, publisher)
        await mesh.start(stage_timeout_s=0.3, lease_s=30)
        hung = await mesh.add("hung")
        hung.go_on.clear()
        await mesh.publish(1)
        with pytest.raises(DeadlineError, match="hung is staging"):
            await mesh.bus.wait_settled(1, 0.05)
        update = await mesh.bus.wait_settled(1, 5)
        assert update.state == "failed"
        assert "did not answer within 0.3 s" in (update.engines[0].why or "")
        hung.go_on.set()
        await mesh.beat("hung")
        while (await mesh.bus.wait_settled(1, 5)).state != "committed":
            await mesh.beat("hung")
        assert hung.receiver.version == 1


async def test_an_engine_that_stops_beating_is_not_waited_for(mesh: Mesh) -> None:
    silent = await mesh.add("silent")
    silent.go_on.clear()
    await mesh.publish(1)
    update = await mesh.bus.wait_settled(1, 5)
    assert update.state == "failed"
    assert "no heartbeat" in (update.engines[0].why or "")
    assert (await mesh.bus.engines()).engines == []


async def test_a_newer_version_supersedes_one_that_is_staging(mesh: Mesh) -> None:
    engine = await mesh.add("a")
    engine.go_on.clear()
    await mesh.publish(1)
    await mesh.publish(2)
    assert (await mesh.bus.wait_settled(1, 5)).state == "superseded"
    engine.go_on.set()
    assert (await mesh.bus.wait_settled(2, 5)).state == "committed"
    assert mesh.journal[-1] == "a committed 2"
    assert "a committed 1" not in mesh.journal


async def test_an_engine_that_comes_late_catches_up(mesh: Mesh) -> None:
    await mesh.publish(1)
    assert (await mesh.bus.wait_settled(1, 5)).state == "failed"
    late = await mesh.add("late")
    await eventually(lambda: late.receiver.version == 1)
    assert (await mesh.bus.wait_settled(1, 5)).state == "committed"
    assert (await mesh.bus.verify()).match


async def test_a_version_is_one_set_of_bytes_for_ever(mesh: Mesh, run_id: str) -> None:
    await mesh.publish(3)
    again = await mesh.bus.announce(mesh.publisher.publish(3, make_weights(3)).manifest())
    assert again.version == 3
    other = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), 256)
    try:
        with pytest.raises(ConflictError, match="published with other bytes"):
            await mesh.bus.announce(other.publish(3, make_weights(4)).manifest())
    finally:
        other.close()
    older = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), 256)
    try:
        with pytest.raises(ConflictError, match="older than 3"):
            await mesh.bus.announce(older.publish(2, make_weights(2)).manifest())
    finally:
        older.close()


async def test_the_same_bytes_from_a_new_publisher_reach_an_engine_that_failed(mesh: Mesh, run_id: str) -> None:
    """The trainer was restarted: the old arena is gone, the new one holds the same version."""
    engine = await mesh.add("a")
    engine.go_on.clear()
    await mesh.publish(1)
    mesh.publisher.close()
    engine.go_on.set()
    assert (await mesh.bus.wait_settled(1, 5)).state == "failed"
    restarted = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), 256)
    try:
        await mesh.bus.announce(restarted.publish(1, make_weights(1)).manifest())
        await eventually(lambda: engine.receiver.version == 1)
    finally:
        restarted.close()


async def test_another_run_and_nonsense_are_refused(mesh: Mesh) -> None:
    stranger = Publisher("other", make_weights(0), "float32", ShmExporter("other"), 256)
    try:
        with pytest.raises(ConflictError, match="belongs to run 'other'"):
            await mesh.bus.announce(stranger.publish(1, make_weights(1)).manifest())
    finally:
        stranger.close()
    with pytest.raises(NotFoundError, match="no update 9"):
        await mesh.bus.wait_settled(9, 1)
    with pytest.raises(WireError, match="no weight manifest"):
        await mesh.bus._send("POST", "/v1/updates", b"nonsense", None)
    await mesh.bus.deregister("nobody")
    assert not (await mesh.bus.verify()).match


async def test_a_bus_that_is_away_is_a_named_deadline() -> None:
    async with BusClient(f"http://127.0.0.1:{free_port()}", "r", deadline_s=0.2) as bus:
        with pytest.raises(DeadlineError, match=r"the weight bus did not answer within 0\.2 s"):
            await bus.engines()


def test_the_command_is_ready_and_ends_quickly_on_sigterm(run_id: str) -> None:
    port = free_port()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from services.cli import main; main()",
            "weight-bus",
            "--run-id",
            run_id,
            f"--port={port}",
        ]
    )
    try:
        wait_for_port(port, process)
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=10).json() == {"not_ready": []}
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_another_address_than_loopback_needs_both_keys(run_id: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-key-of-sixteen-letters")
    command = [sys.executable, "-m", "services", "weight-bus", "--run-id", run_id, "--port", str(free_port())]
    answer = subprocess.run(
        [*command, "--host", "0.0.0.0", "--admin-key-file", str(key)], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 2
    assert "not a loopback address" in answer.stderr
    open_port("0.0.0.0", 0, lacking=()).close()
