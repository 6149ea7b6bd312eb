"""What the weight bus logs of an update belongs to the trace that published it, whoever's call settled it."""

from __future__ import annotations

from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog

from services.config.traces import TraceSettings
from services.observability.setup import open_tracing
from tests.support.bus_fleet import BusFleet, manifest_of
from tests.support.trace_receiver import receiving_traces
from tests.support.until import until
from weight_bus.manifest.manifest import encode_manifest

TRACES = {version: f"{version:032x}" for version in (1, 2)}


async def announce(fleet: BusFleet, version: int) -> None:
    """As a publisher does that has a trace for each version, and in none of the bus's tasks."""
    headers = {"traceparent": f"00-{TRACES[version]}-aaaabbbbccccdddd-01"}
    body = encode_manifest(manifest_of(fleet.run_id, version))
    answer = await fleet.http.post("/v1/updates", content=body, headers=headers)
    assert answer.status_code == 202, answer.text


@asynccontextmanager
async def traced_fleet(run_id: str) -> AsyncIterator[tuple[BusFleet, list[MutableMapping[str, Any]]]]:
    """A bus with traces, and all that it logs."""
    with receiving_traces() as receiver:
        settings = TraceSettings(traces="otlp", traces_endpoint=receiver.endpoint)
        async with AsyncExitStack() as stack:
            tracing = stack.enter_context(open_tracing(settings, "weight-bus", run_id, "bus"))
            fleet = BusFleet(run_id, stack)
            await fleet.start(tracing=tracing)
            with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
                yield fleet, lines


def told(lines: list[MutableMapping[str, Any]]) -> list[tuple[int, str, str | None]]:
    """Version, state and trace of each line about an update."""
    mine = [line for line in lines if line["event"] == "weight update"]
    return [(line["version"], line["state"], line.get("trace_id")) for line in mine]


def failures(lines: list[MutableMapping[str, Any]]) -> list[str | None]:
    """The trace of each line about an engine that failed."""
    return [line.get("trace_id") for line in lines if line["event"] == "engine failed"]


async def test_one_that_the_next_version_overtakes_is_logged_under_its_own_trace(run_id: str) -> None:
    async with traced_fleet(run_id) as (fleet, lines):
        engine = await fleet.add("a")
        engine.go_on.clear()
        await announce(fleet, 1)
        await announce(fleet, 2)
        engine.go_on.set()
        await fleet.bus.wait_settled(2, 10.0)
    assert told(lines) == [(1, "superseded", TRACES[1]), (2, "committed", TRACES[2])]


async def test_one_that_a_heartbeat_begins_again_is_logged_under_its_own_trace(run_id: str) -> None:
    async with traced_fleet(run_id) as (fleet, lines):
        engine = await fleet.add("a")
        engine.broken = "bad hash"
        await announce(fleet, 1)
        assert (await fleet.bus.wait_settled(1, 10.0)).state == "failed"
        await fleet.beat("a")
        await until(lambda: len(failures(lines)) == 2)
        engine.broken = None
        await fleet.beat("a")
        await until(lambda: engine.served == 1 and told(lines)[-1][1] == "committed")
    assert failures(lines) == [TRACES[1], TRACES[1]]
    assert [line for line in told(lines) if line[1] == "committed"] == [(1, "committed", TRACES[1])]
    assert {trace for _, _, trace in told(lines)} == {TRACES[1]}
