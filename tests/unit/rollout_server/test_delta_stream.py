"""Streams of deltas: the first at once, later ones together, an end at once, nothing lost and nothing reordered."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.base import FinishReason, GenerationDelta
from rollout_server.engines.streams import DeltaStream, DeltaStreams
from services.wire.errors import ConflictError, NotReadyError
from services.wire.trajectory import VersionSpan
from tests.support.examples import examples

GATHER_S = 0.010


def delta(token: int, index: int = 0, ends: FinishReason | None = None) -> GenerationDelta:
    return GenerationDelta("r", index, [token], [-1.0 * token], [VersionSpan(0, 1, 3)], ends)


def tokens(deltas: list[GenerationDelta]) -> list[tuple[int, list[int]]]:
    return [(each.index, each.token_ids) for each in deltas]


async def test_the_first_comes_at_once_and_what_follows_together() -> None:
    stream, loop = DeltaStream(GATHER_S), asyncio.get_running_loop()
    stream.put(delta(1))
    assert tokens(await stream.next()) == [(0, [1])]
    began = loop.time()
    waiting = asyncio.ensure_future(stream.next())
    for token in (2, 3, 4):
        await asyncio.sleep(0)
        stream.put(delta(token, index=token % 2))
    together = await waiting
    assert tokens(together) == [(0, [2, 4]), (1, [3])]
    assert together[0].logprobs == [-2.0, -4.0]
    assert together[0].versions == [VersionSpan(0, 2, 3)]
    assert loop.time() - began >= 0.5 * GATHER_S


async def test_the_end_of_a_sample_is_waited_for_by_nobody() -> None:
    stream = DeltaStream(GATHER_S)
    stream.put(delta(1))
    await stream.next()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    stream.put(delta(2))
    stream.put(delta(3, ends="stop"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert waiting.done(), "before the time is up"
    (last,) = waiting.result()
    assert (last.token_ids, last.finish_reason) == ([2, 3], "stop")


async def test_an_error_comes_after_the_deltas_before_it() -> None:
    stream = DeltaStream(GATHER_S)
    stream.put(delta(1))
    await stream.next()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    stream.put(delta(2))
    stream.fail(NotReadyError("closing", "ask another server"))
    assert tokens(await waiting) == [(0, [2])]
    with pytest.raises(NotReadyError):
        await stream.next()


async def test_a_reader_that_gives_up_leaves_the_deltas_for_the_next() -> None:
    stream = DeltaStream(GATHER_S)
    stream.put(delta(1))
    await stream.next()
    stream.put(delta(2))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1 * GATHER_S):
            await stream.next()
    assert tokens(await stream.next()) == [(0, [2])]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30))
@examples(60)
def test_no_token_is_lost_doubled_or_reordered(steps: list[tuple[int, int]]) -> None:
    """`steps`: a sample's index, and how many turns of the loop pass after its token."""

    async def play() -> list[GenerationDelta]:
        streams = DeltaStreams()
        with streams.open("r", GATHER_S) as stream:

            async def put() -> None:
                for token, (index, turns) in enumerate(steps):
                    stream.put(delta(token, index))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                stream.put(delta(99, index=9, ends="stop"))

            putting, got = asyncio.ensure_future(put()), list[GenerationDelta]()
            while not any(each.finish_reason for each in got):
                got += await stream.next()
            await putting
            return got

    read = asyncio.run(play())
    for index in range(3):
        sampled = [token for each in read if each.index == index for token in each.token_ids]
        assert sampled == [token for token, (place, _) in enumerate(steps) if place == index]


async def test_a_flush_gives_out_at_once_what_was_held_back() -> None:
    streams = DeltaStreams()
    with streams.open("r", GATHER_S) as stream:
        stream.put(delta(1))
        await stream.next()
        reading = asyncio.ensure_future(stream.next())
        stream.put(delta(2))
        await asyncio.sleep(0)
        assert not reading.done()
        await streams.flush()
        assert [each.token_ids for each in reading.result()] == [[2]]


async def test_a_name_in_flight_is_taken() -> None:
    streams = DeltaStreams()
    with streams.open("r", GATHER_S), pytest.raises(ConflictError), streams.open("r", GATHER_S):
        pass
