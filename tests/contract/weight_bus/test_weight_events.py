"""The bus's events as they come over a socket, and where a stream goes on that broke off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from services.wire.weights_api import WeightEvent
from tests.support.bus_fleet import BusFleet
from weight_bus.coordinator.events import EventLog, encode_event


@pytest.fixture
async def fleet(run_id: str) -> AsyncIterator[BusFleet]:
    async with AsyncExitStack() as stack:
        fleet = BusFleet(run_id, stack)
        await fleet.start()
        yield fleet


async def read_until(fleet: BusFleet, last_id: str | None, kind: str, version: int) -> list[WeightEvent]:
    """Events up to the first update-wide one of this kind and version."""
    events: list[WeightEvent] = []
    headers = {} if last_id is None else {"last-event-id": last_id}
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=fleet.url) as http:
        async with http.stream("GET", "/v1/events", headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(WeightEvent.model_validate_json(line.removeprefix("data: ")))
                    last = events[-1]
                    if (last.kind, last.version, last.engine_id) == (kind, version, None):
                        break
    return events


async def test_everything_that_happens_is_told_in_order(fleet: BusFleet) -> None:
    await fleet.add("a")
    await fleet.publish(1)
    fleet.engines["a"].broken = "bad hash"
    await fleet.publish(2)
    fleet.engines["a"].broken = None
    await fleet.publish(3)
    await fleet.http.post("/v1/rollback?wait_s=5")
    await fleet.bus.deregister("a")
    told = await read_until(fleet, None, "committed", 3)
    kinds = [(event.kind, event.version, event.engine_id) for event in told]
    one = [("staging", 1, "a"), ("prepared", 1, "a"), ("committed", 1, "a"), ("committed", 1, None)]
    assert [kind for kind in kinds if kind[1] == 1] == [("announced", 1, None), *one]
    assert ("joined", 0, "a") in kinds
    failed = next(event for event in told if (event.kind, event.version, event.engine_id) == ("failed", 2, "a"))
    assert "bad hash" in (failed.why or "")
    rest = await read_until(fleet, told[-1].id, "committed", 1)
    kinds = [(event.kind, event.version, event.engine_id) for event in rest]
    assert ("rolled_back", 3, None) in kinds
    assert ("rolled_back", 3, "a") in kinds
    assert not {event.id for event in told} & {event.id for event in rest}


async def test_a_stream_goes_on_where_it_broke_off_and_hears_what_is_new(fleet: BusFleet) -> None:
    await fleet.add("a")
    await fleet.publish(1)
    first = await read_until(fleet, None, "committed", 1)
    listening = asyncio.create_task(read_until(fleet, first[-1].id, "committed", 2))
    await fleet.publish(2)
    assert [event.version for event in await listening] == [2] * 5
    of_another_life = await read_until(fleet, "0000-3", "committed", 1)
    assert of_another_life == first


async def test_the_memory_is_bounded_and_the_oldest_fall_out() -> None:
    log = EventLog(remembered=3)
    for version in range(10):
        log.add("announced", version=version)
    seen = []
    async for event in log.follow(None, 0.01):
        if event is None:
            break
        seen.append(event)
    assert [event.version for event in seen] == [7, 8, 9]
    async for event in log.follow(seen[1].id, 0.01):
        assert event == seen[2]
        break
    assert encode_event(None).startswith(b":")


async def test_a_slow_reader_misses_nothing_that_comes_while_it_reads() -> None:
    log = EventLog()
    log.add("announced", version=0)
    seen = []
    async for event in log.follow(None, 0.01):
        if event is None:
            break
        seen.append(event.version)
        if len(seen) < 5:
            log.add("announced", version=len(seen))
    assert seen == [0, 1, 2, 3, 4]
