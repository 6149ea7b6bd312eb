"""The link of shared round trips: what breaks it off is mended as an outage is, nothing is lost, mixed up or waits on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from services.run_store.client import connect
from services.run_store.pipelining import PipeliningRedis
from services.supervisor.launch_plan import ValkeyPlan
from tests.support.black_hole import black_hole
from tests.support.until import until

QUICK = {"answer_within_s": 0.3, "connect_within_s": 0.3, "retry_within_s": 1.5}


async def linked(client: Redis) -> PipeliningRedis:
    """`client` once its round trips take a link. They do with every redis-py that we allow, or this fails."""
    assert isinstance(client, PipeliningRedis)
    assert await client.ping()
    await until(lambda: client._link is not None)
    return client


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[PipeliningRedis]:
    client = connect(redis_url)
    yield await linked(client)
    await client.aclose()


async def test_replies_come_as_redis_py_itself_would_parse_them(redis: PipeliningRedis, run_id: str) -> None:
    plain = Redis(connection_pool=redis.connection_pool)
    await redis.zadd(run_id, {"a": 1.5, "b": 2.5})
    await redis.hset(f"{run_id}:h", mapping={"x": "1"})
    await redis.xadd(f"{run_id}:s", {"t": b"\x00\xff"})
    calls: list[Callable[[Redis], Any]] = [
        lambda client: client.zrange(run_id, 0, -1, withscores=True),
        lambda client: client.hgetall(f"{run_id}:h"),
        lambda client: client.xrange(f"{run_id}:s"),
        lambda client: client.get("never"),
        lambda client: client.expire(run_id, 60),
        lambda client: client.smembers("nobody"),
        lambda client: client.config_get("maxmemory-policy"),
        lambda client: client.script_exists("0" * 40),
    ]
    for call in calls:
        assert await call(redis) == await call(plain)
    together = await asyncio.gather(*(call(redis) for call in calls))
    assert together == [await call(plain) for call in calls]
    with pytest.raises(ResponseError, match="wrong kind"):
        await redis.get(run_id)
    assert redis._sender is None and redis._link is not None, "none of it took a task"


async def test_a_link_that_redis_closes_is_replaced_and_every_command_is_answered(redis: PipeliningRedis) -> None:
    async with asyncio.timeout(20):
        killer = Redis(connection_pool=redis.connection_pool)
        for _ in range(5):
            link, name = redis._link, await redis.client_id()
            calls = [asyncio.ensure_future(redis.echo(str(number))) for number in range(300)]
            await asyncio.sleep(0)
            await killer.client_kill_filter(_id=str(name))
            assert await asyncio.gather(*calls) == [str(number).encode() for number in range(300)]
            assert (await linked(redis))._link is not link


async def test_commands_on_a_link_that_falls_silent_are_made_again_in_time(valkey: ValkeyPlan, run_id: str) -> None:
    async with black_hole(valkey.port) as hole, asyncio.timeout(20):
        client = await linked(connect(f"redis://127.0.0.1:{hole.port}/0", **QUICK))
        hole.cut()
        calls = [asyncio.ensure_future(client.rpush(run_id, number)) for number in range(3)]
        await asyncio.sleep(0.1)
        hole.heal()
        began = time.monotonic()
        assert await asyncio.gather(*calls) == [1, 2, 3]
        assert time.monotonic() - began < 5.0
        assert (await linked(client))._link is not None
        await client.aclose()


@pytest.mark.parametrize("idle", [False, True], ids=["while it is used", "while nobody asks"])
async def test_a_silent_redis_is_found_out_as_soon_on_a_link(valkey: ValkeyPlan, idle: bool) -> None:
    """Within the time for one attempt and the repetitions, however long ago the last answer came."""
    async with black_hole(valkey.port) as hole, asyncio.timeout(20):
        client = await linked(connect(f"redis://127.0.0.1:{hole.port}/0", **QUICK))
        if idle:
            await asyncio.sleep(0.7)
        hole.cut()
        began = time.monotonic()
        with pytest.raises(RedisError):
            await client.ping()
        assert 1.0 < time.monotonic() - began < 1.5 + 2 * 0.3 + 1.0
        await client.aclose()


async def test_a_client_that_is_closed_leaves_nobody_waiting_on_its_link(valkey: ValkeyPlan) -> None:
    async with black_hole(valkey.port) as hole, asyncio.timeout(20):
        client = await linked(connect(f"redis://127.0.0.1:{hole.port}/0"))
        hole.cut()
        waiting = [asyncio.ensure_future(client.ping()) for _ in range(3)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await client.aclose()
        for call in waiting:
            with pytest.raises(RedisConnectionError, match="closed"):
                await call
        assert time.monotonic() - began < 2.0


async def test_a_caller_that_gives_up_leaves_its_reply_to_nobody_else(redis: PipeliningRedis) -> None:
    calls = [asyncio.ensure_future(redis.echo(str(number))) for number in range(10)]
    await asyncio.sleep(0)
    calls[0].cancel()
    calls[5].cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for number, reply in enumerate(replies):
        if number in (0, 5):
            assert isinstance(reply, asyncio.CancelledError)
        else:
            assert reply == str(number).encode()


class FakeRedis:
    """Speaks as much of Redis as a client needs to sign in. `script`: the raw replies to `GET`, in their order."""

    def __init__(self, script: list[bytes]) -> None:
        self._script = script
        self.writers: list[asyncio.StreamWriter] = []
        """Of each connection that it had."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        commands = hiredis.Reader()
        while data := await reader.read(65_536):
            commands.feed(data)
            while command := commands.gets():
                writer.write(self._reply(command[0].upper()))
        writer.close()

    def _reply(self, name: bytes) -> bytes:
        if name == b"HELLO":
            return b"%1\r\n$5\r\nproto\r\n:3\r\n"
        if name == b"GET":
            return self._script.pop(0)
        return b"+PONG\r\n" if name == b"PING" else b"+OK\r\n"


@asynccontextmanager
async def speaking_with(*script: bytes) -> AsyncIterator[tuple[PipeliningRedis, FakeRedis]]:
    fake = FakeRedis(list(script))
    listener = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    async with listener, asyncio.timeout(20):
        client = await linked(connect(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"))
        yield client, fake
        await client.aclose()
        for writer in fake.writers:
            await writer.wait_closed()


async def test_a_redis_that_starts_is_asked_again_on_another_connection() -> None:
    async with speaking_with(b"-LOADING Redis is loading the dataset in memory\r\n", b"+ready\r\n") as (client, fake):
        assert await client.get("x") == b"ready"
        assert len(fake.writers) == 2


async def test_an_announcement_of_redis_is_no_reply() -> None:
    async with speaking_with(b">2\r\n+moving\r\n:1\r\n+value\r\n") as (client, fake):
        assert await client.get("x") == b"value"
        assert len(fake.writers) == 1


async def test_half_a_reply_is_waited_for() -> None:
    async with speaking_with(b"+va") as (client, fake):
        call = asyncio.ensure_future(client.get("x"))
        done, _ = await asyncio.wait({call}, timeout=0.1)
        assert not done
        fake.writers[-1].write(b"lue\r\n")
        assert await call == b"value"


async def test_a_reply_that_cannot_be_read_is_told_and_its_connection_not_used_again() -> None:
    async with speaking_with(b"?what\r\n", b"+value\r\n") as (client, fake):
        with pytest.raises(RedisError, match="Protocol error"):
            await client.get("x")
        assert await client.get("x") == b"value"
        assert len(fake.writers) == 2
