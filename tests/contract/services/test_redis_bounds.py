"""What a run keeps in Redis is bounded, key by key, and Redis is not filled: on a real Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from rollout_server.lifecycle.admission import AdmissionGate
from services.policies.admission import StoreUse, store_use
from services.run_store.client import connect
from services.run_store.discovery import FORGOTTEN_AFTER_S, ServiceRecord, ServiceRegistry
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.status import WaitBoard, read_waits
from services.wire.errors import CapacityError
from tests.contract.rollout_server.test_rollout_app_redis import FOREVER, Serving, gate_of
from tests.support.until import until
from tests.unit.services.test_wire import a_trajectory


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def test_the_ids_of_trajectories_are_forgotten_by_generations(redis: Redis, run_id: str) -> None:
    writer, ledger, keys = (
        TrajectoryWriter(redis, run_id, kept_ids=10, kept_ids_s=0),
        Ledger(redis, run_id),
        RunKeys(run_id),
    )
    ids = {}
    for call in range(20):
        names = [f"t{call}.{member}" for member in range(5)]
        published = await writer.publish([a_trajectory(trajectory_id=name) for name in names])
        ids |= dict(zip(names, published, strict=True))
        kept = await redis.hlen(keys.stream_ids) + await redis.hlen(keys.earlier_stream_ids)
        assert kept <= 2 * (10 + 5)
        # Whoever publishes again does so soon.
        for name in names:
            assert await ledger.stream_id_of(name) == ids[name]
        assert await writer.publish([a_trajectory(trajectory_id=names[0])]) == [ids[names[0]]]
    assert await ledger.stream_id_of("t0.0") is None
    assert (await ledger.accounts()).published == 100


async def test_the_ids_of_the_last_minutes_are_kept_however_many_they_are(redis: Redis, run_id: str) -> None:
    writer, ledger = TrajectoryWriter(redis, run_id, kept_ids=2, kept_ids_s=600), Ledger(redis, run_id)
    for number in range(12):
        await writer.publish([a_trajectory(trajectory_id=f"t{number}")])
    assert None not in [await ledger.stream_id_of(f"t{number}") for number in range(12)]


async def test_groups_that_count_as_dropped_are_forgotten_by_generations(redis: Redis, run_id: str) -> None:
    ledger, keys = Ledger(redis, run_id, kept_dropped=8), RunKeys(run_id)
    for number in range(60):
        assert await ledger.drop_group(f"g{number}")
        assert not await ledger.drop_group(f"g{number}")
        assert await redis.scard(keys.dropped_groups) + await redis.scard(keys.earlier_dropped_groups) <= 16
        assert not await ledger.drop_group(f"g{max(0, number - 7)}")
    assert (await ledger.accounts()).dropped_groups == 60


async def test_nothing_is_counted_of_a_group_that_is_not_open(redis: Redis, run_id: str) -> None:
    writer, ledger, keys = TrajectoryWriter(redis, run_id), Ledger(redis, run_id), RunKeys(run_id)
    rules = {"engine_version": 0, "base_version": 0, "k": 0, "batch": 4}
    await ledger.open_group("open", "s0", **rules)
    await writer.publish([a_trajectory(trajectory_id="a", group_id="open"), a_trajectory(trajectory_id="b")])
    assert await redis.hgetall(keys.published_groups) == {b"open": b"1"}
    await ledger.close_group("open")
    assert await redis.hlen(keys.published_groups) == 0


async def test_a_service_that_is_forgotten_leaves_no_wait_behind(redis: Redis, run_id: str) -> None:
    services = ServiceRegistry(redis, run_id)
    gone, here = (ServiceRecord(name=name, kind="gateway", url="http://g") for name in ("gone", "here"))
    await services.announce([gone, here])
    for name in ("gone", "here"):
        await WaitBoard(redis, run_id, name).post("a server")
    long_ago = (time.time() - FORGOTTEN_AFTER_S - 1) * 1000
    await redis.zadd(RunKeys(run_id).service_heartbeats, {"gone": long_ago})
    await services.announce([here])
    assert set(await read_waits(redis, run_id)) == {"here"}


async def test_a_heartbeat_brings_what_redis_holds_without_a_call_of_its_own(redis: Redis, run_id: str) -> None:
    told = await ServiceRegistry(redis, run_id).announce([ServiceRecord(name="g", kind="gateway", url="http://g")])
    assert told.process == (await redis.info("server"))["run_id"]
    assert told.used_bytes > 100_000
    assert told.most_bytes == 0


async def test_where_redis_holds_too_much_nobody_is_admitted_and_is_told_why(redis: Redis, run_id: str) -> None:
    held = [StoreUse(90 << 20, 80 << 20)]
    async with gate_of(redis, run_id, Serving(), store=lambda: held[0], poll_s=0.01) as gate, asyncio.timeout(10):
        with pytest.raises(CapacityError, match=r"until Redis holds less \(now 90 of 80 MiB\)"):
            await gate.open("a", 0.0)
        assert await redis.hlen(RunKeys(run_id).open_groups) == 0
        assert await _waits_for_room(gate, redis, run_id, held) == 0


async def _waits_for_room(gate: AdmissionGate, redis: Redis, run_id: str, held: list[StoreUse]) -> int:
    """One who waits is admitted once a checkpoint has freed memory; the board says what was waited for."""
    waiting = asyncio.create_task(gate.open("a", FOREVER))

    async def posted() -> bool:
        return "Redis holds less" in str(await read_waits(redis, run_id))

    await until(posted)
    held[0] = StoreUse(70 << 20, 80 << 20)
    return await waiting


def test_the_bound_in_bytes_follows_the_setting() -> None:
    assert store_use(5, 0, "auto") is None
    assert store_use(5, 1000, "off") is None
    assert store_use(5, 1000, "auto") == StoreUse(5, 600)
    assert store_use(5, 1000, 1 << 20) == StoreUse(5, 1 << 20)
    assert not StoreUse(49, 100).filling and StoreUse(50, 100).filling and not StoreUse(99, 100).full
    assert StoreUse(100, 100).full
