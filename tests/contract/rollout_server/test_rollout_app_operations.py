"""What operators and the weight bus do to a rollout server: pause, abort, stage, commit, come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rollout_server.engines.base import EngineCrashedError
from services.wire.errors import DeadlineError
from services.wire.weights_api import EngineRegistered
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine
from tests.weight_parts import served
from weight_bus.client.bus_client import BusClient
from weight_bus.client.membership import Membership
from weight_bus.coordinator.app import build_app


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer_length=3)


@pytest.fixture
async def host(engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=small_batch()) as host:
        yield host


async def test_pause_keep_freezes_and_resume_goes_on(host: Host, engine: ScriptedEngine) -> None:
    assert (await host.http.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert (await host.http.get("/is_paused")).json() == {"is_paused": True}
    group = await host.open(group_size=1)
    turn = asyncio.create_task(host.turns(group, "1="))
    await until(lambda: engine.status().running == 1)
    assert (await host.http.post("/resume")).json() == {"status": "resumed"}
    assert (await turn).json()["results"][0]["finish_reason"] == "stop"
    assert (await host.http.get("/is_paused")).json() == {"is_paused": False}


async def test_an_abort_is_never_seen_by_the_agent_its_turns_go_on(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open()
    await engine.pause("keep")
    turn = asyncio.create_task(host.turns(group, "1=", "2="))
    await until(lambda: engine.status().running == 2)
    assert (await host.http.post("/abort_requests", json={})).json() == {"status": "aborted", "aborted": 2}
    await engine.resume()
    assert [result["finish_reason"] for result in (await turn).json()["results"]] == ["stop", "stop"]


async def test_an_unknown_pause_mode_is_refused(host: Host) -> None:
    assert (await host.http.post("/pause?mode=sleep")).status_code == 422


async def test_weights_that_are_no_manifest_or_not_staged_change_nothing(host: Host) -> None:
    no_manifest = await host.http.post("/weights/stage", content=b"\x00")
    assert (no_manifest.status_code, no_manifest.json()["error"]["code"]) == (400, "wire")
    not_staged = await host.http.post("/weights/commit", json={"version": 3})
    assert not_staged.status_code == 409
    assert (await host.http.get("/weights/digest")).json() == {"version": 0, "root_digest": "initial"}


async def test_the_openapi_document_declares_bodies_and_answers(host: Host) -> None:
    document = (await host.http.get("/openapi.json")).json()
    for path, body, answer in (
        ("/groups", "OpenGroup", "GroupOpened"),
        ("/groups/{group_id}/turns", "TakeTurns", "TurnsTaken"),
        ("/groups/{group_id}/finish", "FinishGroup", "GroupFinished"),
    ):
        operation = document["paths"][path]["post"]
        assert body in json.dumps(operation["requestBody"])
        assert answer in json.dumps(operation["responses"])
        assert "ErrorBody" in json.dumps(operation["responses"]["409"])


async def test_an_engine_that_crashed_ends_the_server(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open()
    engine.crash = EngineCrashedError(MemoryError("no room"))
    answer = await host.turns(group, "1=", "2=")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_crashed")
    assert host.stop.failure is engine.crash
    await until(lambda: not engine.started)


async def test_a_server_registers_survives_the_bus_and_leaves_it(
    engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    async with AsyncExitStack() as buses:
        url = await buses.enter_async_context(served(build_app(run_id, 5.0, lease_s=0.5)))
        watcher = await buses.enter_async_context(BusClient(url, run_id, deadline_s=2.0))
        bus = BusClient(url, run_id, deadline_s=0.2)
        async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, bus=bus) as host:
            (view,) = (await watcher.engines()).engines
            assert (view.engine_id, view.url, view.policy_version) == ("s0", host.url, 0)
            engine.set_version(4)

            async def told() -> bool:
                return [each.policy_version for each in (await watcher.engines()).engines] == [4]

            await until(told)  # and so it has stayed past one lease's third
            await watcher.deregister("s0")  # what a bus that was restarted knows: nobody
            await until(told)
        assert (await watcher.engines()).engines == []


async def test_readiness_follows_the_lease() -> None:
    """A bus that goes away makes the server unready when the lease is over, and ready again when it is back."""

    class FlakyBus:
        up = False

        async def register(
            self, engine_id: str, url: str, policy_version: int, *, staged_version: int | None = None, ranks: int = 1
        ) -> EngineRegistered:
            if not self.up:
                raise DeadlineError("nobody listens")
            return EngineRegistered(lease_s=0.1, latest_version=None)

        async def deregister(self, engine_id: str) -> None: ...

        async def close(self) -> None: ...

    bus = FlakyBus()
    membership = Membership(bus, "s0", "http://127.0.0.1:1", lambda: 0)
    beating = asyncio.create_task(membership.run())
    try:
        await until(lambda: "nobody listens" in (membership.not_ready() or ""))
        bus.up = True
        await until(lambda: membership.not_ready() is None)
        bus.up = False
        await until(lambda: "not registered" in (membership.not_ready() or ""))
        bus.up = True
        await until(lambda: membership.not_ready() is None)
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
