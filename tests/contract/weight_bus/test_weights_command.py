"""`rollmesh weights …` as a process against a bus: what it prints, and how it exits."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from clients.weights.cli import show_event, show_status
from clients.weights.client import WeightsClient
from services.security.permissions import Keys
from services.wire.errors import DeadlineError, NotFoundError
from services.wire.weights_api import EnginesView, VersionsView, WeightEvent
from tests.conftest import free_port
from tests.support.bus_fleet import BusFleet, manifest_of
from tests.support.until import until
from weight_bus.coordinator import operations as snapshots
from weight_bus.manifest.manifest import Manifest, encode_manifest

KEY = "an-admin-key-of-many-letters"


@pytest.fixture
async def fleet(run_id: str) -> AsyncIterator[BusFleet]:
    async with AsyncExitStack() as stack:
        yield BusFleet(run_id, stack)


async def weights(fleet: BusFleet, *arguments: str) -> tuple[int, str, str]:
    process = await _start(fleet.url, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def _start(url: str, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "services", "weights", *arguments, "--bus-url", url]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)


async def test_an_operator_holds_commits_and_rolls_back(fleet: BusFleet) -> None:
    await fleet.start()
    await fleet.add("a")
    await fleet.publish(1)
    body = encode_manifest(manifest_of(fleet.run_id, 2))
    await fleet.http.post("/v1/updates?hold=true&wait_s=5", content=body)
    code, out, _ = await weights(fleet, "commit", "2", "--json")
    assert (code, json.loads(out)["state"], fleet.served) == (0, "committed", {"a": 2})
    code, out, _ = await weights(fleet, "rollback")
    assert (code, fleet.served) == (0, {"a": 1})
    assert "version 1 is committed" in out
    code, _, err = await weights(fleet, "rollback")
    assert code == 1
    assert "one step is kept" in err
    assert "Traceback" not in err
    code, out, _ = await weights(fleet, "status", "--json")
    engines, versions = map(json.loads, out.splitlines())
    assert (code, engines["engines"][0]["policy_version"], versions["latest"]) == (0, 1, 1)


async def test_verify_exits_with_what_it_found(fleet: BusFleet, tmp_path: Path) -> None:
    await fleet.start(keys=Keys(admin=KEY))
    await fleet.add("a")
    await fleet.publish(1)
    key = tmp_path / "key"
    key.write_text(KEY)
    code, out, _ = await weights(fleet, "verify", "--admin-key-file", str(key))
    assert code == 0
    assert "every engine serves its bytes" in out
    assert "the canaries agree" in out
    fleet.engines["a"].digest = "rotten"
    assert (await weights(fleet, "verify", "--no-canary", "--admin-key-file", str(key)))[0] == 1
    code, _, err = await weights(fleet, "verify")
    assert code == 1
    assert "no valid key" in err


async def test_push_publishes_a_folder_under_the_next_version(
    fleet: BusFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def manifest(folder: Path, run_id: str, version: int) -> Manifest:
        assert folder == tmp_path
        return manifest_of(run_id, version)

    monkeypatch.setattr(snapshots, "_manifest", manifest)
    await fleet.start()
    engine = await fleet.add("a")
    await fleet.publish(4)
    code, out, _ = await weights(fleet, "push", str(tmp_path), "--json")
    assert (code, json.loads(out)["version"], fleet.served) == (0, 5, {"a": 5})
    engine.broken = "not in a trusted folder"
    code, out, _ = await weights(fleet, "push", str(tmp_path))
    assert code == 1
    assert "not in a trusted folder" in " ".join(out.split())
    assert "`rollmesh weights commit 6` asks for it again; until then it stays failed" in out
    engine.broken = None
    for _ in range(3):
        await fleet.beat("a")
    await fleet.add("b")
    await until(lambda: fleet.served == {"a": 5, "b": 5})
    code, out, _ = await weights(fleet, "commit", "6")
    assert (code, fleet.served) == (0, {"a": 6, "b": 6})


async def test_watch_prints_events_until_ctrl_c(fleet: BusFleet) -> None:
    await fleet.start()
    process = await _start(fleet.url, "watch", "--json")
    assert process.stdout is not None
    await fleet.add("a")
    await fleet.publish(1)
    kinds: list[str] = []
    async with asyncio.timeout(30):
        while kinds[-1:] != ["committed"]:
            kinds.append(json.loads(await process.stdout.readline())["kind"])
    assert kinds == ["joined", "announced", "staging", "prepared", "committed"]
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 130
    assert "Traceback" not in err.decode()


async def test_misuse_and_a_bus_that_is_away(fleet: BusFleet) -> None:
    fleet.url = f"http://127.0.0.1:{free_port()}"
    code, _, err = await weights(fleet, "status")
    assert code == 1
    assert "cannot be reached" in err
    assert (await weights(fleet, "commit", "many"))[0] == 2


def test_the_client_names_what_it_waits_for() -> None:
    with WeightsClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(DeadlineError, match="cannot be reached"):
            client.engines()


async def test_the_clients_errors_are_the_bus_s(fleet: BusFleet) -> None:
    await fleet.start()
    await fleet.add("a")
    fleet.engines["a"].go_on.clear()
    await fleet.publish(1, wait_s=0)
    with WeightsClient(fleet.url) as client:
        with pytest.raises(NotFoundError, match="no update 9"):
            await asyncio.to_thread(client.commit, 9)
        with pytest.raises(DeadlineError, match="a is staging"):
            await asyncio.to_thread(client.wait, 1, 0.1)
        paused = await asyncio.to_thread(client.pause, "abort")
    assert [each.done for each in paused.engines] == [True]
    fleet.engines["a"].go_on.set()


def test_an_event_is_a_line_with_its_time_and_all_that_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    show_event(WeightEvent(id="1", at=3661.25, kind="failed", version=7, engine_id="s0", why="out of memory"))
    show_event(WeightEvent(id="2", at=0.0, kind="held"))
    assert capsys.readouterr().out == "01:01:01.250 failed v7 s0: out of memory\n00:00:00.000 held\n"


def test_a_bus_without_engines_and_versions_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_status(EnginesView(engines=[]), VersionsView(latest=None, versions=[]))
    assert capsys.readouterr().out == "no engine is registered\nno version was announced\n"
