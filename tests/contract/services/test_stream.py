"""The trajectory stream and the ledger on a real Valkey: exactly once in, nothing lost, accounts that balance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from services.run_store.admission_queue import ADMISSION_CLOSED, RUN_CONCLUDED
from services.run_store.client import check_reachable, connect
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.status import WaitBoard, read_waits
from services.run_store.stream import TrajectoryReader
from services.wire.errors import ConcludedError, DrainingError, UsageError
from services.wire.trajectory import decode_trajectory
from tests.conftest import free_port
from tests.unit.services.test_wire import a_trajectory


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def test_what_is_published_is_read_byte_for_byte(redis: Redis, run_id: str) -> None:
    sent = [a_trajectory(trajectory_id=f"t{i}", member=i) for i in range(3)]
    ids = await TrajectoryWriter(redis, run_id).publish(sent)
    reader = TrajectoryReader(redis, run_id)
    await reader.open()
    entries = await reader.read(count=10, block_ms=1000)
    assert [entry.stream_id for entry in entries] == ids
    assert [decode_trajectory(entry.payload) for entry in entries] == sent


async def test_publishing_twice_appends_once(redis: Redis, run_id: str) -> None:
    writer, ledger = TrajectoryWriter(redis, run_id), Ledger(redis, run_id)
    first = await writer.publish([a_trajectory(trajectory_id="a")])
    again = await writer.publish([a_trajectory(trajectory_id="a"), a_trajectory(trajectory_id="b")])
    assert again[0] == first[0]
    assert (await ledger.accounts()).published == 2


async def test_a_reader_that_died_leaves_nothing_behind(redis: Redis, run_id: str) -> None:
    """What was delivered and not settled is what the next life reads first; settled entries never come again."""
    writer = TrajectoryWriter(redis, run_id)
    ids = await writer.publish([a_trajectory(trajectory_id=f"t{i}") for i in range(6)])
    first_life = TrajectoryReader(redis, run_id)
    await first_life.open()
    await first_life.read(count=4, block_ms=100)
    await first_life.acknowledge_trained(ids[:2])

    second_life = TrajectoryReader(redis, run_id)
    await second_life.open()
    seen = []
    while entries := await second_life.read(count=3, block_ms=50):
        seen += [entry.stream_id for entry in entries]
    assert seen == ids[2:]
    assert await second_life.pending() == 4


async def test_settling_twice_counts_once_and_accounts_balance(redis: Redis, run_id: str) -> None:
    ids = await TrajectoryWriter(redis, run_id).publish([a_trajectory(trajectory_id=f"t{i}") for i in range(5)])
    reader = TrajectoryReader(redis, run_id)
    await reader.open()
    await reader.read(count=5, block_ms=100)
    assert await reader.acknowledge_trained(ids[:3]) == 3
    assert await reader.acknowledge_trained(ids[:3]) == 0
    assert await reader.acknowledge_dropped("wire", ids[2:]) == 2
    accounts = await Ledger(redis, run_id).accounts()
    assert (accounts.published, accounts.trained, accounts.dropped) == (5, 3, {"wire": 2})
    assert accounts.published == accounts.trained + accounts.dropped_total()


async def test_acknowledged_entries_can_be_replayed_until_they_are_trimmed(redis: Redis, run_id: str) -> None:
    ids = await TrajectoryWriter(redis, run_id).publish([a_trajectory(trajectory_id=f"t{i}") for i in range(3)])
    reader = TrajectoryReader(redis, run_id)
    await reader.open()
    await reader.read(count=3, block_ms=100)
    await reader.acknowledge_trained(ids)
    assert [entry.stream_id for entry in await reader.fetch([ids[2], ids[0]])] == [ids[2], ids[0]]
    assert await reader.trim_before(ids[2]) == 2
    assert [entry.stream_id for entry in await reader.fetch(ids)] == [ids[2]]


async def test_a_blocking_read_outlasts_the_client_library(redis: Redis, run_id: str) -> None:
    """An entry that comes while a read blocks ends the wait at once."""
    reader = TrajectoryReader(redis, run_id)
    await reader.open()
    reading = asyncio.create_task(reader.read(count=1, block_ms=20_000))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await TrajectoryWriter(redis, run_id).publish([a_trajectory()])
        assert len(await reading) == 1


async def test_a_concluded_run_takes_no_trajectories_but_answers_repeats(redis: Redis, run_id: str) -> None:
    writer, ledger = TrajectoryWriter(redis, run_id), Ledger(redis, run_id)
    known = await writer.publish([a_trajectory(trajectory_id="a")])
    await ledger.conclude(final_version=9)
    assert await writer.publish([a_trajectory(trajectory_id="a")]) == known
    with pytest.raises(ConcludedError):
        await writer.publish([a_trajectory(trajectory_id="b")])
    accounts = await ledger.accounts()
    assert (accounts.concluded, accounts.final_version, accounts.published) == (True, 9, 1)


async def test_a_group_that_another_server_holds_is_not_written_to(redis: Redis, run_id: str) -> None:
    one = a_trajectory(trajectory_id="a")
    await redis.hset(RunKeys(run_id).owners, one.group_id, "s1/life")
    with pytest.raises(DrainingError, match=f"group {one.group_id} was taken over"):
        await TrajectoryWriter(redis, run_id, "s0/life").publish([one])
    assert len(await TrajectoryWriter(redis, run_id, "s1/life").publish([one])) == 1


async def test_two_runs_in_one_redis_never_meet(redis: Redis, run_id: str) -> None:
    await TrajectoryWriter(redis, run_id).publish([a_trajectory()])
    other = TrajectoryReader(redis, f"{run_id}-other")
    await other.open()
    assert await other.read(count=1, block_ms=20) == []


async def test_admission_holds_under_a_stampede(redis: Redis, run_id: str) -> None:
    """A hundred concurrent calls from two servers: exactly the policy's number get in, each with its own ordinal."""
    ledger = Ledger(redis, run_id)
    answers = await asyncio.gather(
        *(ledger.open_group(f"g{i}", f"s{i % 2}", engine_version=0, base_version=0, k=2, batch=5) for i in range(100))
    )
    admitted = sorted(answer for answer in answers if answer != ADMISSION_CLOSED)
    assert admitted == list(range(15))
    records = await ledger.open_groups()
    assert len(records) == 15
    assert {record.server_id for record in records.values()} <= {"s0", "s1"}


async def test_closing_a_group_counts_once_and_a_drop_makes_room(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)

    async def open_one(name: str) -> int:
        return await ledger.open_group(name, "s0", engine_version=0, base_version=0, k=0, batch=2)

    assert [await open_one(name) for name in ("a", "b", "c")] == [0, 1, ADMISSION_CLOSED]
    assert await ledger.close_group("a")
    assert not await ledger.close_group("a")
    assert await open_one("c") == ADMISSION_CLOSED  # finished, not yet trained: still within the bound
    assert await ledger.close_group("b", dropped=True)
    assert await open_one("c") == 2
    accounts = await ledger.accounts()
    assert (accounts.opened_groups, accounts.closed_groups, accounts.dropped_groups) == (3, 2, 1)


async def test_a_concluded_run_opens_no_group(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    await ledger.conclude(final_version=3)
    assert await ledger.open_group("a", "s0", engine_version=3, base_version=0, k=2, batch=5) == RUN_CONCLUDED


async def test_the_base_version_is_set_once(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    assert await ledger.begin(7) == 7
    assert await ledger.begin(9) == 7


async def test_waits_are_seen_while_they_last(redis: Redis, run_id: str) -> None:
    board = WaitBoard(redis, run_id, "trainer")
    async with board.waiting("group g7: 7 of 8 siblings"):
        assert (await read_waits(redis, run_id))["trainer"].waiting_for == "group g7: 7 of 8 siblings"
    assert await read_waits(redis, run_id) == {}


async def test_a_dead_redis_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"no Redis answers at redis://127\.0\.0\.1:\d+/0"):
        await check_reachable(f"redis://127.0.0.1:{free_port()}/0")


async def test_a_misspelt_redis_address_is_one_line() -> None:
    with pytest.raises(UsageError, match="is no Redis address"):
        await check_reachable("localhost:6379")
