"""Calls that a client makes at once go in one request; each is answered as if it had been sent alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clients.rollout.client import RolloutClient
from services.wire.errors import CapacityError, ContextLengthError, NotFoundError, UsageError
from services.wire.joined_calls import MOST_CALLS, PATH, JoinedAnswer
from services.wire.rollout_api import FinishGroup, GroupOpened, OpenGroup, SamplingBody, SessionReward, TakeTurns, Turn
from tests.contract.clients.test_client_calls import an_error, standing_in
from tests.support.flaky_proxy import Failure, FlakyProxy, flaky_proxy
from tests.support.gateway_host import gateway
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until

OPENING = OpenGroup(task="sums", group_size=2, sampling=SamplingBody(max_tokens=4), wait_s=0.0)
BATCH = 6


@pytest.fixture
async def host(redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    engine, terms = ScriptedEngine(answer_length=2), small_batch(k=0, batch=BATCH)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=terms) as host:
        yield host


@asynccontextmanager
async def behind(host: Host, way: str) -> AsyncIterator[str]:
    """Where runners call the server: at itself, or at a gateway before it."""
    if way == "alone":
        yield host.url
        return
    async with gateway(host.redis_url, host.run_id) as front:
        await front.until_known(s0="serving")
        yield front.url


ways = pytest.mark.parametrize("way", ["alone", "gateway"])


@asynccontextmanager
async def through(
    host: Host, *failures: Failure, way: str = "alone"
) -> AsyncIterator[tuple[RolloutClient, FlakyProxy]]:
    """A client, and how many connections it takes: a call alone has one of its own while it lasts."""
    async with (
        behind(host, way) as url,
        flaky_proxy(url) as proxy,
        RolloutClient(proxy.url, patience_s=5.0) as client,
    ):
        proxy.fail(*failures)
        yield client, proxy


async def opened(client: RolloutClient, count: int) -> list[GroupOpened]:
    return await asyncio.gather(*(client.open_group(OPENING) for _ in range(count)))


def turns_of(group: GroupOpened) -> TakeTurns:
    return TakeTurns(turns=[Turn(session_id=name, text="12=") for name in group.session_ids])


async def played(client: RolloutClient, groups: Sequence[GroupOpened]) -> list[FinishGroup]:
    """A turn in each session, all at once, and the rewards."""
    await asyncio.gather(*(client.take_turns(group.group_id, turns_of(group)) for group in groups))
    return [
        FinishGroup(rewards=[SessionReward(session_id=name, reward=1.0) for name in group.session_ids])
        for group in groups
    ]


@ways
async def test_groups_are_opened_played_and_finished_in_one_request_each_with_its_own_end(host: Host, way: str) -> None:
    async with through(host, way=way) as (client, proxy):
        groups = await opened(client, 4)
        assert sorted(group.ordinal for group in groups) == [0, 1, 2, 3]
        rewards = await played(client, groups)
        ends = await asyncio.gather(
            client.finish_group(groups[0].group_id, rewards[0]),
            client.finish_group("g-unknown", rewards[1]),
            client.finish_group(groups[1].group_id, rewards[2]),
            client.finish_group(groups[2].group_id, rewards[2]),
            client.finish_group(groups[3].group_id, rewards[3]),
            return_exceptions=True,
        )
        assert proxy.connections == 1, "no call was sent beside another"
    assert [type(end) for end in (ends[1], ends[2])] == [NotFoundError, UsageError]
    finished = [end.stream_ids for end in (ends[0], ends[3], ends[4]) if not isinstance(end, BaseException)]
    named = [list(groups[place].session_ids) for place in (0, 2, 3)]
    assert [sorted(ids) for ids in finished] == [sorted(names) for names in named]
    assert {each.trajectory_id for each in await host.published()} == {name for names in named for name in names}


async def test_an_answer_does_not_wait_for_the_others(host: Host) -> None:
    async with RolloutClient(host.url) as client:
        waits = OPENING.model_copy(update={"wait_s": 20.0})
        calls = [asyncio.create_task(client.open_group(waits)) for _ in range(BATCH + 2)]
        await until(lambda: sum(call.done() for call in calls) == BATCH)
        last = [call for call in calls if not call.done()]
        last[0].cancel()
        await asyncio.sleep(0)
        assert not last[1].done(), "a call that is taken back takes no other with it"
        last[1].cancel()
        await asyncio.gather(*last, return_exceptions=True)

        async def nobody_waits() -> bool:
            report = await host.report()
            return (report["admission_waiting"], report["open_groups"]) == (0, BATCH)

        await until(nobody_waits)


@ways
@pytest.mark.parametrize("all_of_them", [False, True])
async def test_a_turn_that_nobody_waits_for_generates_no_more(
    redis_url: str, run_id: str, tiny_policy: Path, all_of_them: bool, way: str
) -> None:
    engine = ScriptedEngine(answer_length=2)
    terms = small_batch(k=0, batch=BATCH)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=terms) as host:
        async with behind(host, way) as url, RolloutClient(url) as client:
            groups = await opened(client, 3)
            await engine.pause("keep")
            calls = [asyncio.create_task(client.take_turns(each.group_id, turns_of(each))) for each in groups]
            await until(lambda: len(engine.requests) == 3)
            given_up = calls if all_of_them else calls[:1]
            for call in given_up:
                call.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
            await until(lambda: engine.aborted_early == len(given_up))
            await engine.resume()
            taken = await asyncio.gather(*calls[len(given_up) :])
            assert [len(each.results) for each in taken] == [2] * (3 - len(given_up)), "the others go on"
            # Their sessions are free again, and hold nothing of what was given up.
            again = await client.take_turns(groups[0].group_id, turns_of(groups[0]))
            await client.finish_group(
                groups[0].group_id,
                FinishGroup(rewards=[SessionReward(session_id=each.session_id, reward=1.0) for each in again.results]),
            )
            assert [each.sampled_tokens() for each in await host.published()] == [3, 3]


async def test_a_long_body_goes_alone(host: Host) -> None:
    async with through(host) as (client, proxy):
        groups = await opened(client, 2)
        long = TakeTurns(turns=[Turn(session_id=groups[0].session_ids[0], text="1" * (256 << 10))])
        ends = await asyncio.gather(
            client.take_turns(groups[0].group_id, long),
            client.take_turns(groups[1].group_id, turns_of(groups[1])),
            return_exceptions=True,
        )
        assert isinstance(ends[0], ContextLengthError), ends[0]
        assert proxy.connections == 2


@ways
async def test_what_is_refused_is_refused_by_its_own_error(host: Host, way: str) -> None:
    async with behind(host, way) as url, RolloutClient(url, patience_s=0.0) as client:
        ends = await asyncio.gather(*(client.open_group(OPENING) for _ in range(BATCH + 1)), return_exceptions=True)
    refused = [end for end in ends if isinstance(end, BaseException)]
    assert [type(end) for end in refused] == [CapacityError]
    assert isinstance(refused[0], CapacityError) and refused[0].retry_after_s > 0


@ways
@pytest.mark.parametrize("failure", ["drop", "lose", "half"])
async def test_calls_whose_request_breaks_are_sent_again_and_take_effect_once(
    host: Host, failure: Failure, way: str
) -> None:
    async with through(host, failure, way=way) as (client, _):
        groups = await opened(client, 3)
        assert len({group.group_id for group in groups}) == 3

        async def only_they_are_open() -> bool:
            return set(await host.ledger.open_groups()) == {group.group_id for group in groups}

        await until(only_they_are_open)


async def test_a_gateway_sends_each_call_to_its_own_server(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    """Two servers, one of which drains after the turns: what it held is finished at the other."""
    engines, settings = [ScriptedEngine(answer_length=2) for _ in "ab"], small_batch(k=0, batch=BATCH)
    mesh: dict[str, Any] = {"redis_url": redis_url, "run_id": run_id, "model": tiny_policy, "settings": settings}
    async with (
        hosting(engines[0], **mesh, server_id="s0") as first,
        hosting(engines[1], **mesh, server_id="s1"),
        gateway(redis_url, run_id, failover_timeout_s=15.0) as front,
        flaky_proxy(front.url) as proxy,
        RolloutClient(proxy.url) as client,
    ):
        await front.until_known(s0="serving", s1="serving")
        groups = await opened(client, BATCH)
        rewards = await played(client, groups)
        assert all(engine.requests for engine in engines), "both servers hold some of the groups"
        assert (await first.http.post("/admin/drain")).status_code == 202
        ends = await asyncio.gather(
            *(client.finish_group(group.group_id, each) for group, each in zip(groups, rewards, strict=True))
        )
        assert proxy.connections == 1
        assert [sorted(end.stream_ids) for end in ends] == [sorted(group.session_ids) for group in groups]


async def test_more_than_fit_go_in_several_requests(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    count = MOST_CALLS + 2
    engine, terms = ScriptedEngine(answer_length=2), small_batch(k=0, batch=count)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=terms) as host:
        async with through(host) as (client, proxy):
            assert len({group.group_id for group in await opened(client, count)}) == count
            assert proxy.connections == 2


async def test_a_service_that_knows_no_joined_calls_gets_each_alone() -> None:
    group: dict[str, Any] = {"group_id": "g", "ordinal": 0, "session_ids": ["s"], "api_keys": ["k"]}
    async with standing_in() as service, RolloutClient(service.url) as client:
        service.will_answer((201, group | {"policy_version": 0}))
        await client.open_group(OPENING)
        assert [each.path for each in service.said] == ["/groups"], "a single call"
        service.will_answer((404, an_error("not_found")), (201, group | {"policy_version": 0}))
        await opened(client, 2)
        await opened(client, 2)
        assert [each.path for each in service.said] == [PATH, *["/groups"] * 4], "it is asked once"


@pytest.mark.parametrize(
    ("calls", "status"),
    [
        ([{"path": "/admin/drain", "body": {}}], 404),
        ([{"path": "/groups/../admin/drain", "body": {}}], 404),
        ([{"path": "/groups/g/turn", "body": {}}], 404),
        ([{"path": "/groups/g?/turns", "body": {}}], 404),
        ([{"path": "/groups/g HTTP/1.1\r\nx: y/turns", "body": {}}], 404),
        ([{"path": "/groups/g/turns", "body": {}}], 422),
        ([{"path": "/groups", "body": {"task": 3}}], 422),
        ([{"path": "/groups", "body": {}, "name": "short"}], 422),
    ],
)
@ways
async def test_other_calls_are_not_taken(host: Host, calls: list[dict[str, Any]], status: int, way: str) -> None:
    async with behind(host, way) as url:
        answer = await host.http.post(f"{url}{PATH}", json={"calls": calls})
    lines = [msgspec.json.decode(line, type=JoinedAnswer) for line in answer.content.splitlines()]
    assert (answer.status_code, [(line.number, line.status) for line in lines]) == (200, [(0, status)])


@ways
async def test_a_request_holds_a_number_of_calls_that_is_bounded(host: Host, way: str) -> None:
    async with behind(host, way) as url:
        for count in (0, MOST_CALLS + 1):
            answer = await host.http.post(f"{url}{PATH}", json={"calls": [{"path": "/groups", "body": {}}] * count})
            assert answer.status_code == 422
        for name in ("0\r\nx: 1", "0\n"):
            split = {"path": "/groups", "body": {}, "name": name}
            assert (await host.http.post(f"{url}{PATH}", json={"calls": [split]})).status_code == 422, name
        plain = await host.http.post(f"{url}{PATH}", content=b'{"calls": []}', headers={"content-type": "text/plain"})
        assert plain.status_code == 422
