"""Groups of environment runners: given up at once when their runner is gone, at every server; never while it lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from services.run_store.discovery import ServiceRecord, ServiceRegistry
from services.run_store.keys import RunKeys
from services.run_store.ledger import Accounts
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until

ME = {"name": "env", "incarnation": "0000aaaa"}
NEXT = {"name": "env", "incarnation": "1111bbbb"}
AT_ONCE_S = 8.0
"""A tenth of the idle time that groups without a runner have, on a machine that does much else."""


def by(runner: dict[str, str]) -> str:
    return f"{runner['name']}/{runner['incarnation']}"


@pytest.fixture
async def pair(
    redis_url: str, run_id: str, tiny_policy: Path, request: pytest.FixtureRequest
) -> AsyncIterator[list[Host]]:
    """Two servers of a run in which one batch, of two groups, may be open. `param`: the lease in seconds."""
    settings = small_batch(k=0, batch=2)
    settings.rollout.runner_lease_s = getattr(request, "param", 60.0)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                hosting(
                    ScriptedEngine(),
                    redis_url=redis_url,
                    run_id=run_id,
                    model=tiny_policy,
                    settings=settings,
                    server_id=f"s{number}",
                )
            )
            for number in range(2)
        ]


async def tell(host: Host, route: str, runner: dict[str, str], status: int = 200) -> Any:
    answer = await host.http.post(route, json=runner)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def open_groups(host: Host) -> int:
    return int((await host.report())["open_groups"])


async def dropped(host: Host) -> Accounts:
    async def both() -> bool:
        return (await host.ledger.accounts()).dropped_groups == 2

    await until(both, AT_ONCE_S)
    return await host.ledger.accounts()


async def test_the_groups_of_a_runner_that_starts_again_are_given_up_at_once_on_all_servers(pair: list[Host]) -> None:
    here, there = pair
    assert (await tell(here, "/runners", ME))["lease_s"] == 60.0
    groups = [await host.open(runner=by(ME)) for host in pair]
    assert (await there.turns(groups[1], "1=", "1=")).status_code == 200
    assert (await here.try_open(runner=by(ME))).status_code == 429
    await tell(here, "/runners", NEXT)
    accounts = await dropped(here)
    assert (accounts.opened_groups, accounts.closed_groups) == (2, 2)
    assert [await open_groups(host) for host in pair] == [0, 0]
    refused = await there.finish(groups[1], 1.0, 0.0)
    assert (refused.status_code, "runner_gone" in refused.text) == (409, True)
    for host in pair:
        await host.open(runner=by(NEXT))
    await asyncio.sleep(0)
    assert [await open_groups(host) for host in pair] == [1, 1]
    # The one that was replaced is told so, however late it wakes up, and takes nothing back.
    refused = await there.http.post("/runners/heartbeat", json=ME)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    await tell(there, "/runners/leave", ME, 204)
    await tell(there, "/runners/heartbeat", NEXT)


async def test_a_runner_that_leaves_gives_its_groups_up_at_once(pair: list[Host]) -> None:
    await tell(pair[0], "/runners", ME)
    for host in pair:
        await host.open(runner=by(ME))
    await tell(pair[1], "/runners/leave", ME, 204)
    await dropped(pair[0])
    refused = await pair[0].http.post("/runners/heartbeat", json=ME)
    assert refused.status_code == 409, "a heartbeat that was on its way must not bring it back"


@pytest.mark.parametrize("pair", [1.0], indirect=True)
async def test_a_silent_runner_loses_its_groups_after_its_lease_one_that_lives_keeps_them(pair: list[Host]) -> None:
    here, there = pair
    other = {"name": "other", "incarnation": "2222cccc"}
    await tell(here, "/runners", ME)
    await tell(here, "/runners", other)
    lost, kept = await here.open(runner=by(ME)), await there.open(runner=by(other))
    nobodys = await here.open(purpose="evaluate")

    async def given_up() -> bool:
        await tell(there, "/runners/heartbeat", other)
        await asyncio.sleep(0.1)
        return (await here.ledger.accounts()).dropped_groups == 1

    began = time.monotonic()
    await until(given_up, AT_ONCE_S)
    assert time.monotonic() - began > 0.9, "it had a lease"
    assert (await here.turns(lost, "1=", "1=")).status_code == 409
    assert (await there.turns(kept, "1=", "1=")).status_code == 200
    assert (await here.turns(nobodys, "1=", "1=")).status_code == 200, "a group without a runner lasts its idle time"


@pytest.mark.parametrize("pair", [1.0], indirect=True)
async def test_while_all_gateways_are_away_no_runner_is_silent(pair: list[Host]) -> None:
    here, _ = pair
    registry = ServiceRegistry(here.redis, here.run_id)
    gateway = ServiceRecord(name="gateway", kind="gateway", url="http://127.0.0.1:1", lease_s=0.0)
    await registry.announce([gateway])  # as one that was killed stands there
    await tell(here, "/runners", ME)
    await here.open(runner=by(ME))
    await asyncio.sleep(2.5)
    assert await open_groups(here) == 1
    await registry.announce([ServiceRecord(name="gateway", kind="gateway", url=gateway.url, lease_s=60.0)])
    await until(lambda: _none_open(here), AT_ONCE_S)


async def _none_open(host: Host) -> bool:
    return await open_groups(host) == 0


async def test_a_group_that_was_taken_over_is_still_its_runners(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    settings = small_batch(k=0, batch=2)
    async with AsyncExitStack() as stack:

        def serve(server_id: str) -> Any:
            engine = ScriptedEngine()
            return hosting(
                engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings, server_id=server_id
            )

        kept = await stack.enter_async_context(serve("s1"))
        async with serve("s0") as leaving:
            await tell(leaving, "/runners", ME)
            group = await leaving.open(runner=by(ME))
        assert (await kept.turns(group, "1=", "1=")).status_code == 200
        await tell(kept, "/runners/leave", ME, 204)
        await until(lambda: _none_open(kept), AT_ONCE_S)


async def test_runners_are_forgotten(pair: list[Host]) -> None:
    here, keys = pair[0], RunKeys(pair[0].run_id)
    await tell(here, "/runners", {"name": "old", "incarnation": "3333dddd"})
    await here.redis.zadd(keys.runner_heartbeats, {"old": 1})
    await tell(here, "/runners", ME)
    assert [await here.redis.hkeys(keys.runners), await here.redis.zrange(keys.runner_heartbeats, 0, -1)] == [
        [b"env"]
    ] * 2


async def test_what_is_no_runner_is_refused(pair: list[Host]) -> None:
    for named in ("env", "env/", "/0000aaaa", "env/0000aaaa/x", "e" * 65 + "/0000aaaa", "env/00"):
        assert (await pair[0].try_open(runner=named)).status_code == 422, named
    for runner in ({"name": "a/b", "incarnation": "0000aaaa"}, {"name": "env", "incarnation": "00"}, {"name": "env"}):
        await tell(pair[0], "/runners", runner, 422)
