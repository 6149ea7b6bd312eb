"""Commands that share round trips: each gets its own reply, one's error is its own, few pieces travel, all end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from services.run_store.client import connect
from services.run_store.pipelining import MOST_BYTES, PipeliningRedis
from services.supervisor.launch_plan import ValkeyPlan
from tests.support.black_hole import black_hole
from tests.support.until import until


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[PipeliningRedis]:
    client = connect(redis_url)
    assert isinstance(client, PipeliningRedis)
    yield client
    await client.aclose()


async def test_each_gets_its_own_reply_and_one_error_is_its_own(redis: PipeliningRedis, run_id: str) -> None:
    await redis.set(run_id, "text")
    echo = redis.register_script("return ARGV[1]")
    broken = redis.register_script("return redis.error_reply('MINE ' .. ARGV[1])")
    calls = [echo(args=[number]) if number % 3 else broken(args=[number]) for number in range(200)]
    wrong = redis.lpush(run_id, 1)
    *replies, refused = await asyncio.gather(*calls, wrong, return_exceptions=True)
    assert isinstance(refused, ResponseError), "a list command on a text"
    for number, reply in enumerate(replies):
        if number % 3:
            assert reply == str(number).encode()
        else:
            assert isinstance(reply, ResponseError)
            assert str(reply) == f"MINE {number}"


async def test_what_is_asked_for_together_travels_together(redis: PipeliningRedis) -> None:
    before = await redis.info("stats")
    await asyncio.gather(*(redis.ping() for _ in range(500)))
    after = await redis.info("stats")
    assert after["total_commands_processed"] - before["total_commands_processed"] >= 500
    assert after["total_reads_processed"] - before["total_reads_processed"] <= 20


async def test_many_bytes_go_in_several_round_trips(redis: PipeliningRedis, run_id: str) -> None:
    large = b"x" * (MOST_BYTES // 2)
    keys = [f"{run_id}:{number}" for number in range(8)]
    await asyncio.gather(*(redis.set(key, large) for key in keys))
    assert await asyncio.gather(*(redis.strlen(key) for key in keys)) == [len(large)] * 8
    assert await redis.get(keys[0]) == large
    await redis.delete(*keys)


async def test_round_trips_keep_one_connection_and_replace_it_where_redis_closed_it(redis: PipeliningRedis) -> None:
    async with asyncio.timeout(20):
        first = await redis.client_id()
        await asyncio.gather(*(redis.client_list() for _ in range(3)))
        assert await redis.client_id() == first
        await close_connection(redis, first)
        second = await redis.client_id()
        assert second != first
        assert await redis.client_id() == second


async def test_a_reply_that_cannot_be_read_leaves_none_for_the_next_commands(redis: PipeliningRedis) -> None:
    def unreadable(reply: object, **_: object) -> object:
        raise ValueError(f"{reply!r}")

    redis.set_response_callback("TIME", unreadable)
    calls = [redis.echo("a"), redis.time(), redis.echo("b"), redis.echo("c")]
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(reply, ValueError) for reply in replies)
    assert await asyncio.gather(*(redis.echo(text) for text in "xyz")) == [b"x", b"y", b"z"]


async def close_connection(redis: PipeliningRedis, client_id: int) -> None:
    """Have Redis close a connection of this client, from another one."""
    other = Redis(connection_pool=redis.connection_pool)
    assert await other.client_kill_filter(_id=str(client_id)) == 1


async def test_a_read_that_waits_holds_nobody_up(redis: PipeliningRedis, run_id: str) -> None:
    await redis.xgroup_create(run_id, "group", mkstream=True)
    reads = [
        asyncio.ensure_future(redis.xread({run_id: "$"}, block=20_000)),
        asyncio.ensure_future(redis.xreadgroup("group", "reader", {run_id: ">"}, block=20_000)),
    ]
    for _ in range(3):
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(redis.ping(), 10.0)
    assert not any(read.done() for read in reads)
    await redis.xadd(run_id, {"t": "x"})
    assert all(await asyncio.wait_for(asyncio.gather(*reads), 10.0))


async def test_a_caller_that_gives_up_takes_nobody_along(redis: PipeliningRedis, run_id: str) -> None:
    tasks = [asyncio.ensure_future(redis.incr(run_id)) for _ in range(10)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(reply, int) for reply in replies) == 9
    assert isinstance(replies[3], asyncio.CancelledError)
    assert await redis.incr(run_id) in (10, 11)


async def test_where_redis_is_silent_all_are_told_in_time_and_the_next_are_answered(valkey: ValkeyPlan) -> None:
    async with black_hole(valkey.port) as hole, asyncio.timeout(20):
        client = connect(
            f"redis://127.0.0.1:{hole.port}/0", answer_within_s=0.3, connect_within_s=0.3, retry_within_s=0.5
        )
        assert isinstance(client, PipeliningRedis)
        await client.ping()
        hole.cut()
        began = asyncio.get_running_loop().time()
        first = [asyncio.ensure_future(client.ping()) for _ in range(5)]
        await asyncio.sleep(0.05)
        later = [asyncio.ensure_future(client.ping()) for _ in range(5)]
        for call in [*first, *later]:
            with pytest.raises(RedisError):
                await call
        assert asyncio.get_running_loop().time() - began < 5.0
        hole.heal()
        assert await client.ping()
        await client.aclose()


async def test_a_client_that_is_closed_leaves_nobody_waiting(valkey: ValkeyPlan) -> None:
    async with black_hole(valkey.port) as hole, asyncio.timeout(20):
        client = connect(f"redis://127.0.0.1:{hole.port}/0")
        await client.ping()
        hole.cut()
        waiting = asyncio.ensure_future(client.ping())
        await until(lambda: client._sender is not None)  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        await client.aclose()
        with pytest.raises(RedisConnectionError):
            await waiting
