"""Admission and the ends of groups: who is let in and when, and that no account is left open by anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from services.config.settings import RunSettings
from services.run_store.ledger import Ledger
from services.run_store.status import read_waits
from services.wire.errors import RollmeshError
from tests.conftest import free_port
from tests.support.committing import commit
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine


class Serve(Protocol):
    def __call__(
        self, engine: ScriptedEngine, settings: RunSettings, *, server_id: str = "s0"
    ) -> AbstractAsyncContextManager[Host]: ...


@pytest.fixture
def serve(redis_url: str, run_id: str, tiny_policy: Path) -> Serve:
    def make(
        engine: ScriptedEngine, settings: RunSettings, *, server_id: str = "s0"
    ) -> AbstractAsyncContextManager[Host]:
        return hosting(
            engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings, server_id=server_id
        )

    return make


@pytest.fixture
async def host(serve: Serve) -> AsyncIterator[Host]:
    async with serve(ScriptedEngine(), small_batch(k=0, batch=2)) as host:
        yield host


async def close_all(host: Host) -> None:
    """All that is open is finished, and the server hears nothing of it."""
    ledger = Ledger(host.redis, host.run_id)
    await ledger.close_groups(list(await ledger.open_groups()))


async def test_k_0_lets_in_one_batch_a_version(host: Host) -> None:
    assert [(await host.open())["ordinal"] for _ in range(2)] == [0, 1]
    refused = await host.try_open()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "capacity"
    await close_all(host)
    await commit(host, 1)
    opened = await host.open()
    assert (opened["ordinal"], opened["policy_version"]) == (2, 1)


async def test_a_commit_wakes_those_who_wait_in_their_order(host: Host) -> None:
    for _ in range(2):
        await host.open()
    waiting = []
    for position in range(4):
        waiting.append(asyncio.create_task(host.open(wait_s=60.0)))
        await until_waiting(host, position + 1)
    await close_all(host)
    await commit(host, 1)
    first = await asyncio.wait_for(asyncio.gather(*waiting[:2]), 15.0)
    assert [group["ordinal"] for group in first] == [2, 3]
    assert not waiting[2].done()
    await close_all(host)
    await commit(host, 2)
    assert [group["ordinal"] for group in await asyncio.gather(*waiting[2:])] == [4, 5]


async def until_waiting(host: Host, count: int) -> None:
    async def so_many() -> bool:
        return bool((await host.report())["admission_waiting"] == count)

    await until(so_many)


async def test_a_dropped_group_makes_room_although_nobody_here_was_told(host: Host) -> None:
    for _ in range(2):
        await host.open()
    waiting = asyncio.create_task(host.open(wait_s=10.0))
    await until_waiting(host, 1)
    # Found by the trainer to be unfit: its places are two, as it is still open.
    (first, _) = await host.ledger.open_groups()
    assert await host.ledger.drop_group(first)
    assert not waiting.done()
    await Ledger(host.redis, host.run_id).close_group(first)
    assert (await waiting)["ordinal"] == 2


async def test_a_wait_that_ends_answers_429_and_a_long_one_is_posted(host: Host) -> None:
    for _ in range(2):
        await host.open()
    waiting = [asyncio.create_task(host.try_open(wait_s=6.0)) for _ in range(3)]

    async def posted(version: int) -> bool:
        wait = (await read_waits(host.redis, host.run_id)).get("s0")
        return wait is not None and wait.waiting_for.endswith(f" groups wait for weights newer than version {version}")

    await until(partial(posted, 0))
    await close_all(host)
    await commit(host, 1)
    # Two are let in, and the third waits for version 2 from then on.
    await until(partial(posted, 1))
    assert sorted([(await each).status_code for each in waiting]) == [201, 201, 429]

    async def cleared() -> bool:
        return "s0" not in await read_waits(host.redis, host.run_id)

    await until(cleared)


async def test_a_client_that_gives_up_waiting_is_not_let_in_later(host: Host) -> None:
    for _ in range(2):
        await host.open()
    hasty = asyncio.create_task(host.open(wait_s=10.0))
    await until_waiting(host, 1)
    hasty.cancel()
    await until_waiting(host, 0)
    await close_all(host)
    await commit(host, 1)
    assert [(await host.open())["ordinal"] for _ in range(2)] == [2, 3]
    assert len(await host.ledger.open_groups()) == 2


async def test_two_servers_share_one_account(serve: Serve, host: Host) -> None:
    async with serve(ScriptedEngine(), small_batch(k=0, batch=2), server_id="s1") as other:
        assert (await host.open())["ordinal"] == 0
        assert (await other.open())["ordinal"] == 1
        assert (await host.try_open()).status_code == 429
        assert (await other.try_open()).status_code == 429


async def test_a_concluded_run_lets_nobody_in_and_takes_nothing_more(host: Host) -> None:
    group = await host.open()
    await host.turns(group, "1=", "1=")
    waiting = [asyncio.create_task(host.try_open(wait_s=10.0)) for _ in range(3)]
    await until_waiting(host, 2)
    await host.ledger.conclude(0)
    assert sorted([(await answer).status_code for answer in waiting]) == [201, 410, 410]
    assert (await host.try_open()).status_code == 410
    for _ in range(2):
        assert (await host.finish(group, 1.0, 0.0)).status_code == 410
    accounts = await host.ledger.accounts()
    assert (accounts.published, accounts.opened_groups, accounts.dropped_groups) == (0, 2, 1)
    assert await host.published() == []


async def test_groups_published_before_the_end_keep_their_answer_when_others_come_too_late(host: Host) -> None:
    early, late = await host.open(), await host.open()
    for group in (early, late):
        await host.turns(group, "1=", "1=")
    first = await host.finish(early, 1.0, 0.0)
    await host.ledger.conclude(0)
    again, refused = await asyncio.gather(host.finish(early, 1.0, 0.0), host.finish(late, 1.0, 0.0))
    assert (again.text, refused.status_code) == (first.text, 410)


async def test_a_client_that_dies_in_mid_turn_gives_its_place_back_long_before_the_idle_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.lifecycle.expire.LEFT_AFTER_S", 0.5)
    engine = ScriptedEngine()
    async with serve(engine, small_batch(timeout_s=120.0)) as host:
        group, other = await host.open(), await host.open()
        await engine.pause("keep")
        turn = asyncio.create_task(host.turns(group, "1=", "2="))
        await until(lambda: engine.status().running == 2)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await engine.resume()
        await until(lambda: _open_are(host, other))
        assert (await host.ledger.accounts()).dropped_groups == 1


async def _open_are(host: Host, group: dict[str, Any]) -> bool:
    return set(await host.ledger.open_groups()) == {group["group_id"]}


async def test_an_idle_group_is_dropped_and_its_place_given_back(serve: Serve) -> None:
    async with serve(ScriptedEngine(), small_batch(k=0, batch=1, timeout_s=0.2)) as host:
        group = await host.open()
        replacement = await host.open(wait_s=10.0)
        assert replacement["ordinal"] == 1
        late = await host.turns(group, "1=", "1=")
        assert late.status_code == 409
        assert "idle" in late.json()["error"]["message"]
        assert (await host.finish(group, 1.0, 0.0)).status_code == 409
        assert (await host.ledger.accounts()).dropped_groups == 1


async def test_a_group_that_speaks_for_long_is_not_idle(serve: Serve) -> None:
    engine = ScriptedEngine(answer_length=8, step_s=0.1)
    async with serve(engine, small_batch(timeout_s=0.3)) as host:
        group = await host.open()
        assert (await host.turns(group, "1=", "1=")).status_code == 200
        assert (await host.finish(group, 1.0, 0.0)).status_code == 200


async def test_a_server_that_stops_leaves_no_group_open_and_no_caller_waiting(serve: Serve) -> None:
    engine = ScriptedEngine()
    async with serve(engine, small_batch(k=0, batch=2)) as host:
        speaking, _ = await host.open(), await host.open()
        await engine.pause("keep")
        turn = asyncio.create_task(host.turns(speaking, "1=", "1="))
        waiting = asyncio.create_task(host.try_open(wait_s=60.0))
        await until_waiting(host, 1)
        await until(lambda: engine.status().running > 0)
        await engine.resume()
        host.stop.fail(RollmeshError("the test ends it"))
        assert (await asyncio.wait_for(waiting, 15.0)).status_code == 503
        assert (await asyncio.wait_for(turn, 15.0)).status_code == 200
        await until(lambda: not engine.started, 15.0)
        accounts = await host.ledger.accounts()
        assert (accounts.opened_groups, accounts.dropped_groups) == (2, 2)
        assert await host.ledger.open_groups() == {}


async def test_probes_answer_while_the_model_is_still_being_made(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    engine = ScriptedEngine()
    hosted = hosting(engine, redis_url=redis_url, run_id=run_id, model=model, port=(port := free_port()))
    entering = asyncio.create_task(hosted.__aenter__())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        async with asyncio.timeout(5):
            while True:
                try:
                    assert (await http.get("/livez")).status_code == 200
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.005)
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert str(model) in ready.json()["not_ready"][0]
        early = await http.post("/groups", json={"task": "t", "group_size": 1, "sampling": {"max_tokens": 1}})
        assert early.status_code == 503
        assert not engine.started
        model.symlink_to(tiny_policy)
        host = await entering
        assert (await host.open(group_size=1))["ordinal"] == 0
    await hosted.__aexit__(None, None, None)
