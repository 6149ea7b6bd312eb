"""The journal on a real Valkey: only its owner writes, nothing is written twice, and what is uncertain is read again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from rollout_server.journal.journal import RELEASED, Journal
from rollout_server.journal.records import (
    JOURNAL_SCHEMA,
    GroupBegan,
    GroupEnded,
    PartialHead,
    PartialPart,
    Rewarded,
    decode_partial,
    decode_record,
    encode_record,
)
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.wire.errors import DrainingError, NotReadyError, RollmeshError, WireError
from tests.support.memory_journal import MemoryJournal

BEGAN = GroupBegan(
    group_id="g",
    ordinal=0,
    size=1,
    task="t",
    purpose="train",
    idle_timeout_s=60.0,
    sampling=None,
    opened_at=0.0,
)


def reward(value: float) -> Rewarded:
    return Rewarded(session_id="s", value=value)


class Writer:
    """A journal whose queue is served; `lost`: the groups it was told to forget, and why."""

    def __init__(self, redis: Redis, run_id: str, name: str) -> None:
        self.lost: list[tuple[str, str]] = []
        self.journal = Journal(redis, run_id, f"{name}/1", name, self._lose)
        self.applied: list[float] = []

    def _lose(self, group_id: str, why: RollmeshError) -> None:
        self.lost.append((group_id, why.code))

    async def write(self, value: float) -> None:
        await self.journal.append("g", reward(value), lambda: self.applied.append(value))


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def writer(redis: Redis, run_id: str, name: str) -> AsyncIterator[Writer]:
    made = Writer(redis, run_id, name)
    serving = asyncio.create_task(made.journal.run())
    try:
        yield made
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def values(journal: Journal) -> list[float]:
    return [record.value for record in await journal.read("g") if isinstance(record, Rewarded)]


async def test_what_is_written_at_once_is_applied_in_the_journals_order(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        await asyncio.gather(*(one.write(float(number)) for number in range(300)))
        assert await values(one.journal) == one.applied == [float(number) for number in range(300)]


async def test_a_caller_that_goes_away_leaves_journal_and_state_alike(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        calling = asyncio.create_task(one.write(1.0))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await one.write(2.0)
        assert await values(one.journal) == one.applied == [1.0, 2.0]


async def test_an_owner_that_was_taken_for_dead_can_write_nothing_more(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one, writer(redis, run_id, "b") as other:
        await one.journal.open(BEGAN, [], lambda: None)
        await one.write(1.0)
        records = await other.journal.claim("g", "a/1")
        assert records is not None and len(records) == 2
        assert await one.journal.claim("g", "a/1") is None
        with pytest.raises(DrainingError):
            await one.write(2.0)
        with pytest.raises(DrainingError):
            await one.journal.conclude("g", GroupEnded(stream_ids=None, cause="idle"), [])
        assert one.lost[0] == ("g", "draining")
        await other.write(3.0)
        assert (await values(other.journal), one.applied, other.applied) == ([1.0, 3.0], [1.0], [3.0])
        with pytest.raises(DrainingError):
            await one.journal.add_partial("g", one.journal.partial_key("s", "c"), PartialHead("call", 0))
        assert await other.journal.read_partial(other.journal.partial_key("s", "c")) == []


async def test_a_group_is_opened_by_one_server_only(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one, writer(redis, run_id, "b") as other:
        await one.journal.open(BEGAN, [], lambda: None)
        with pytest.raises(DrainingError):
            await other.journal.open(BEGAN, [], lambda: None)
        await one.journal.open(BEGAN, [], lambda: None)  # the same call, repeated because its answer was lost
        assert len(await one.journal.read("g")) == 1
        await one.journal.conclude("g", GroupEnded(stream_ids={}, cause=None), [])
        with pytest.raises(DrainingError):
            await other.journal.open(BEGAN, [], lambda: None)


async def test_a_group_that_ends_while_another_is_opened_stops_no_queue(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        written = asyncio.ensure_future(one.journal.append("g", reward(1.0), lambda: None))
        opened = one.journal.open(msgspec.structs.replace(BEGAN, group_id="g1"), [], lambda: None)
        for _ in range(2):  # both are taken from the queue, and the opening is on its way
            await asyncio.sleep(0)
        one.journal.ended("g")
        with pytest.raises(DrainingError):
            await written
        await opened
        await one.journal.append("g1", reward(2.0), lambda: None)


async def test_groups_that_are_opened_at_once_fail_alone(redis: Redis, run_id: str) -> None:
    names = ["g0", "g1", "g2"]
    began = [msgspec.structs.replace(BEGAN, group_id=name) for name in names]
    taken: list[str] = []
    async with writer(redis, run_id, "a") as one, writer(redis, run_id, "b") as other:
        await other.journal.open(began[1], [], lambda: None)
        openings = [one.journal.open(each, [], lambda name=each.group_id: taken.append(name)) for each in began]  # type: ignore[misc]
        found = await asyncio.gather(*openings, return_exceptions=True)
        assert [type(each) for each in found] == [type(None), DrainingError, type(None)]
        assert taken == ["g0", "g2"], "what is opened is taken up, and nothing else"
        for name in ("g0", "g2"):
            assert await one.journal.owner_of(name) == "a/1"
            await one.journal.append(name, reward(1.0), lambda: None)
            assert len(await one.journal.read(name)) == 2
        assert await one.journal.owner_of("g1") == "b/1"


async def test_what_was_released_is_taken_by_the_first_that_asks(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one, writer(redis, run_id, "b") as other:
        await one.journal.open(BEGAN, [], lambda: None)
        await one.journal.release(["g"])
        assert await other.journal.owner_of("g") == RELEASED
        assert await other.journal.claim("g", RELEASED) is not None
        await one.journal.release(["g"])  # it is not its own any more
        assert await other.journal.owner_of("g") == "b/1"


class Flaky:
    """A script whose answer is lost after it has run, once."""

    def __init__(self, script: object) -> None:
        self._script = script
        self.times = 1

    async def __call__(self, **arguments: object) -> object:
        answer = await self._script(**arguments)  # type: ignore[operator]
        if self.times:
            self.times -= 1
            raise RedisConnectionError("lost")
        return answer


async def test_a_lost_answer_is_told_and_the_journal_is_read_again(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        one.journal._write = Flaky(one.journal._write)  # type: ignore[assignment]
        with pytest.raises(NotReadyError):
            await one.write(1.0)
        assert (one.lost, one.applied) == ([("g", "not_ready")], [])
        with pytest.raises(DrainingError):
            await one.write(2.0)  # nothing before it was read again
        assert len(await one.journal.claim("g", "a/1") or []) == 2  # the write had taken effect
        await one.write(3.0)
        assert await values(one.journal) == [1.0, 3.0]


async def test_a_script_that_the_client_repeats_appends_once(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        script = one.journal._write

        async def twice(**arguments: object) -> object:
            await script(**arguments)  # type: ignore[arg-type]
            return await script(**arguments)  # type: ignore[arg-type]

        one.journal._write = twice  # type: ignore[assignment]
        partial = one.journal.partial_key("s", "c")
        await one.journal.add_partial("g", partial, PartialHead("call", 7))
        await one.journal.add_partial("g", partial, PartialPart(1, 0, 0, b"", b"", [], None))
        assert [type(part) for part in await one.journal.read_partial(partial)] == [PartialHead, PartialPart]
        await asyncio.gather(one.write(1.0), one.write(2.0))
        assert await values(one.journal) == one.applied == [1.0, 2.0]


async def test_an_answer_is_kept_for_a_while_and_its_partial_answer_is_not(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        partial = one.journal.partial_key("s", "c")
        await one.journal.add_partial("g", partial, PartialHead("call", 7))
        await one.journal.append("g", reward(1.0), lambda: None, partial=partial, answer=("call", b"said"))
        assert await one.journal.kept_answers("g", ["call", "other"]) == [b"said", None]
        assert await one.journal.read_partial(partial) == []
        await one.journal.append("g", reward(2.0), lambda: None, answer=("short", b"word"))
        assert await one.journal.kept_answers("g", ["short"]) == [b"word"]
        await one.journal.conclude("g", GroupEnded(stream_ids=None, cause="idle"), ["s"])
        assert 0 < await redis.ttl(RunKeys(run_id).journal("g")) <= 600
        assert await one.journal.owner_of("g") is None


async def test_a_partial_answer_is_kept_for_an_hour_after_one_of_its_last_parts(redis: Redis, run_id: str) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        partial = one.journal.partial_key("s", "c")
        await one.journal.add_partial("g", partial, PartialHead("call", 7))
        assert 3000 < await redis.ttl(partial) <= 3600
        await redis.expire(partial, 100)
        for number in range(1, 33):
            await one.journal.add_partial("g", partial, PartialPart(number, 0, 0, b"", b"", [], None))
        assert 3000 < await redis.ttl(partial) <= 3600


async def test_parts_that_are_added_at_once_stand_in_their_order_and_begin_the_hour_anew(
    redis: Redis, run_id: str
) -> None:
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        parts = [PartialPart(number, 0, 0, b"", b"", [], None) for number in range(1, 9001)]
        here, there = one.journal.partial_key("s", "c"), one.journal.partial_key("s", "d")
        await asyncio.gather(
            one.journal.add_partial("g", here, PartialHead("call", 7), *parts[:40]),
            one.journal.add_partial("g", there, parts[0]),
            one.journal.add_partial("g", here, *parts[40:42]),
        )
        assert 3000 < await redis.ttl(here) <= 3600
        await redis.expire(here, 100)
        await one.journal.add_partial("g", here, *parts[42:])
        assert 3000 < await redis.ttl(here) <= 3600
        assert await one.journal.read_partial(here) == [PartialHead("call", 7), *parts]
        assert await one.journal.read_partial(there) == parts[:1]


@pytest.mark.parametrize("kind", ["real", "memory"])
async def test_who_waits_for_parts_hears_of_them_before_who_waits_for_a_later_record(
    kind: str, redis: Redis, run_id: str
) -> None:
    told: list[str] = []
    async with either(kind, redis, run_id) as journal:
        partial = journal.partial_key("s", "c")
        journal.add_partial("g", partial, PartialHead("call", 7)).add_done_callback(lambda _: told.append("parts"))
        await journal.append("g", reward(1.0), lambda: None, partial=partial)
        told.append("record")
    assert told == ["parts", "record"]


async def test_records_and_parts_that_are_written_together_each_heed_their_groups_owner(
    redis: Redis, run_id: str
) -> None:
    async with writer(redis, run_id, "a") as one, writer(redis, run_id, "b") as other:
        for group_id in ("g", "lost"):
            await one.journal.open(msgspec.structs.replace(BEGAN, group_id=group_id), [], lambda: None)
        assert await other.journal.claim("lost", "a/1") is not None
        parts = [PartialPart(number, 0, 0, b"", b"", [], None) for number in (1, 2)]
        here, there = one.journal.partial_key("s", "c"), one.journal.partial_key("s", "d")
        done = await asyncio.gather(
            one.journal.add_partial("g", here, parts[0]),
            one.write(1.0),
            one.journal.add_partial("lost", there, parts[0]),
            one.journal.append("lost", reward(5.0), lambda: one.applied.append(5.0), answer=("x", b"said")),
            one.write(2.0),
            one.journal.add_partial("g", here, parts[1]),
            return_exceptions=True,
        )
        assert [type(each) for each in done if each is not None] == [DrainingError, DrainingError]
        assert [each is None for each in done] == [True, True, False, False, True, True]
        assert await one.journal.read_partial(here) == parts
        assert await one.journal.read_partial(there) == []
        assert await values(one.journal) == one.applied == [1.0, 2.0]
        assert await one.journal.kept_answers("lost", ["x"]) == [None]


@asynccontextmanager
async def either(kind: str, redis: Redis, run_id: str) -> AsyncIterator[Journal | MemoryJournal]:
    if kind == "memory":
        yield MemoryJournal()
        return
    async with writer(redis, run_id, "a") as one:
        await one.journal.open(BEGAN, [], lambda: None)
        yield one.journal


@pytest.mark.parametrize("kind", ["real", "memory"])
async def test_the_journal_of_tests_does_as_the_real_one(kind: str, redis: Redis, run_id: str) -> None:
    async with either(kind, redis, run_id) as journal:
        partial = journal.partial_key("s", "call")
        part = PartialPart(1, 0, 0, b"t", b"l", [], None)
        assert await journal.read_partial(partial) == []
        await journal.add_partial("g", partial, PartialHead("c-1", 7))
        await journal.add_partial("g", partial, part)
        assert await journal.read_partial(partial) == [PartialHead("c-1", 7), part]
        assert (
            await journal.append("g", reward(1.0), lambda: "applied", partial=partial, answer=("c-1", b"whole"))
            == "applied"
        )
        assert await journal.read_partial(partial) == []
        assert await journal.kept_answers("g", ["c-0", "c-1"]) == [None, b"whole"]
        with pytest.raises(ZeroDivisionError):
            await journal.append("g", reward(2.0), lambda: 1 // 0)
        written = journal.records() if isinstance(journal, MemoryJournal) else await journal.read("g")
        assert [record.value for record in written if isinstance(record, Rewarded)] == [1.0, 2.0]


def test_bytes_that_are_no_record_are_refused_and_never_guessed_at() -> None:
    head = PartialHead("call", 5)
    assert (decode_record(encode_record(BEGAN)), decode_partial(encode_record(head))) == (BEGAN, head)
    for packed in (b"", encode_record(BEGAN)[:-1], encode_record(head), msgspec.msgpack.encode({"type": "another"})):
        with pytest.raises(WireError, match=f"a journal record of {len(packed)} bytes cannot be read"):
            decode_record(packed)
    for packed in (b"", encode_record(head)[:-1], encode_record(BEGAN)):
        with pytest.raises(WireError, match=f"a part of a partial answer of {len(packed)} bytes cannot be read"):
            decode_partial(packed)
    other = msgspec.structs.replace(BEGAN, schema=JOURNAL_SCHEMA + 1)
    with pytest.raises(WireError, match=f"schema {JOURNAL_SCHEMA + 1}, this process reads {JOURNAL_SCHEMA}"):
        decode_record(encode_record(other))
