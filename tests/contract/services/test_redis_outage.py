"""Redis that is cut off, full, or evicts: said within seconds, no call waits for ever, what can be repeated is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError
from structlog.testing import capture_logs

from services.run_store.client import LONGEST_BLOCK_MS, check_store, connect
from services.run_store.ledger import Ledger
from services.run_store.patience import passes, repeated
from services.run_store.publishing import TrajectoryWriter
from services.run_store.status import WaitBoard, read_waits
from services.run_store.stream import TrajectoryReader
from services.supervisor.launch_plan import ValkeyPlan
from services.wire.errors import DeadlineError, UsageError
from tests.conftest import free_port, running_valkey
from tests.support.black_hole import BlackHole, black_hole
from tests.support.until import until
from tests.unit.services.test_wire import a_trajectory

QUICK = {"answer_within_s": 0.3, "connect_within_s": 0.3, "retry_within_s": 0.5}


@asynccontextmanager
async def through(hole: BlackHole) -> AsyncIterator[Redis]:
    """A client as every process has it, but for its patience."""
    client = connect(f"redis://127.0.0.1:{hole.port}/0", **QUICK)
    try:
        yield client
    finally:
        await client.aclose()


@pytest.fixture
def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyPlan]:
    """One that a test may fill and reconfigure."""
    with running_valkey(tmp_path_factory.mktemp("own-valkey")) as plan:
        yield plan


async def test_a_silent_redis_is_named_in_the_log_and_the_call_ends(valkey: ValkeyPlan) -> None:
    async with black_hole(valkey.port) as hole, through(hole) as redis, asyncio.timeout(20):
        assert await redis.ping()
        hole.cut()
        with capture_logs() as lines, pytest.raises(RedisError):
            await redis.ping()
        (said,) = [line for line in lines if line["event"] == "Redis does not answer"]
        assert (said["log_level"], said["redis"]) == ("warning", f"redis://127.0.0.1:{hole.port}/0")
        hole.heal()
        with capture_logs() as lines:
            assert await redis.ping()
        assert [line["event"] for line in lines] == ["Redis answers again"]


async def test_every_client_has_deadlines_and_has_the_kernel_watch_its_connections(redis_url: str) -> None:
    redis = connect(redis_url)
    connection = await redis.connection_pool.get_connection()
    assert LONGEST_BLOCK_MS / 1000 < connection.retry.answer_within_s <= 5.0
    assert connection.socket_connect_timeout is not None
    held = connection._writer.get_extra_info("socket")
    assert held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert 0 < held.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
    await redis.connection_pool.release(connection)
    await redis.aclose()


async def test_a_reader_goes_on_by_itself_after_a_silent_cut(valkey: ValkeyPlan, redis_url: str, run_id: str) -> None:
    beside = connect(redis_url)
    async with black_hole(valkey.port) as hole, through(hole) as redis, asyncio.timeout(20):
        reader = TrajectoryReader(redis, run_id)
        await reader.open()
        hole.cut()
        with pytest.raises(RedisError):
            await reader.read(8, block_ms=60_000)
        ids = await TrajectoryWriter(beside, run_id).publish([a_trajectory(trajectory_id="meanwhile")])
        hole.heal()
        assert [entry.stream_id for entry in await reader.read(8, block_ms=60_000)] == ids
    await beside.aclose()


async def test_an_acknowledgement_outlasts_an_outage_and_counts_once(
    valkey: ValkeyPlan, redis_url: str, run_id: str
) -> None:
    beside = connect(redis_url)
    async with black_hole(valkey.port) as hole, through(hole) as redis, asyncio.timeout(20):
        ids = await TrajectoryWriter(redis, run_id).publish([a_trajectory(trajectory_id=f"t{i}") for i in range(3)])
        reader = TrajectoryReader(redis, run_id)
        await reader.open()
        await reader.read(8, block_ms=1000)
        hole.cut()
        with capture_logs() as lines:
            acknowledging = asyncio.create_task(repeated(lambda: reader.acknowledge_trained(ids), "acknowledging"))
            await until(lambda: any(line["event"] == "a call to Redis is made again" for line in lines), 15.0)
        hole.heal()
        await acknowledging
        assert (await Ledger(beside, run_id).accounts()).trained == 3
    await beside.aclose()


async def test_what_is_repeated_ends_by_its_deadline_and_names_what_it_was() -> None:
    nobody = connect(f"redis://127.0.0.1:{free_port()}/0", **QUICK)
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineError, match=r"counting sheep: Redis has failed for 1 s"):
            await repeated(nobody.ping, "counting sheep", within_s=1.0)
    await nobody.aclose()


async def test_a_full_redis_ends_nobody_at_the_wait_board_and_is_outlasted_elsewhere(
    own_valkey: ValkeyPlan, run_id: str
) -> None:
    redis = connect(own_valkey.url)
    ledger, board = Ledger(redis, run_id), WaitBoard(redis, run_id, "trainer")
    await redis.config_set("maxmemory", "1")
    assert not await board.post("the batch of step 4")
    assert not await board.post("the batch of step 5")
    with pytest.raises(OutOfMemoryError) as full:
        await ledger.drop_group("g1")
    assert passes(full.value)
    with capture_logs() as lines:
        dropping = asyncio.create_task(repeated(lambda: ledger.drop_group("g1"), "dropping a group"))
        await until(lambda: bool(lines))
        await redis.config_set("maxmemory", "0")
        assert await dropping
    assert await board.post("the batch of step 6")
    assert (await read_waits(redis, run_id))["trainer"].waiting_for == "the batch of step 6"
    assert (await ledger.accounts()).dropped_groups == 1
    await redis.aclose()


async def test_a_redis_that_evicts_keys_is_refused_also_where_it_may_not_be_asked_for_its_configuration(
    own_valkey: ValkeyPlan,
) -> None:
    redis = connect(own_valkey.url)
    await check_store(own_valkey.url)
    await redis.acl_setuser("plain", enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-config"])
    plain = own_valkey.url.replace("redis://", "redis://plain:any@")
    await check_store(plain)
    for policy in ("allkeys-lru", "volatile-ttl"):
        await redis.config_set("maxmemory-policy", policy)
        for url in (own_valkey.url, plain):
            with pytest.raises(UsageError, match=rf"maxmemory-policy {policy}.*CONFIG SET maxmemory-policy noeviction"):
                await check_store(url)
    await redis.aclose()
