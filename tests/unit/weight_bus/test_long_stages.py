"""A stage that takes ten minutes, by a clock that jumps: in time for a large version, and too late for a small one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog
from pydantic import TypeAdapter

from services.wire.weights_api import CommitAnswer, RegisterEngine, StageAnswer, UpdateView
from tests.support.quick_clock import quickly
from weight_bus.coordinator.coordinator import Coordinator
from weight_bus.coordinator.engine_client import EngineClient
from weight_bus.manifest.manifest import Bucket, Layout, Manifest, Owner

RUN = "r"
GB = 10**9
DIGEST = "aa" * 32


class SlowEngine:
    """Stands where an engine's HTTP connections do: a stage takes it so long."""

    def __init__(self, takes_s: float, nbytes: int) -> None:
        self.takes_s, self.nbytes = takes_s, nbytes

    async def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None) -> bytes:
        if url.endswith("/commit"):
            committed = CommitAnswer(version=1, flip_ms=1.0, requests_in_flight=0)
            return TypeAdapter(CommitAnswer).dump_json(committed)
        await asyncio.sleep(self.takes_s)
        staged = StageAnswer(version=1, root_digest=DIGEST, bytes_read=self.nbytes, seconds=self.takes_s)
        return TypeAdapter(StageAnswer).dump_json(staged)

    async def close(self) -> None: ...


def updated(takes_s: float, nbytes: int) -> tuple[UpdateView, Coordinator]:
    """What becomes of a version of so many bytes, at one engine."""
    client = EngineClient(30.0)
    client._http = SlowEngine(takes_s, nbytes)  # type: ignore[assignment]
    coordinator = Coordinator(RUN, client, lease_s=1e6)
    manifest = Manifest(
        run_id=RUN,
        version=1,
        layout=Layout(tensors=[], total_bytes=nbytes, digest="l"),
        owners=[Owner(total_bytes=nbytes, sources=[])],
        buckets=[Bucket(offset=0, length=nbytes, hash="bb" * 32)],
        root_digest=DIGEST,
    )

    async def update() -> UpdateView:
        coordinator.register(RegisterEngine(engine_id="e", url="http://e", run_id=RUN, policy_version=0))
        coordinator.announce(manifest, b"", final=True)
        try:
            return await coordinator.wait_resting(1, 7200.0)
        finally:
            await coordinator.close()

    return quickly(update)[0], coordinator


def test_a_stage_of_ten_minutes_is_in_time_for_a_large_version_and_told_of() -> None:
    with structlog.testing.capture_logs() as logged:
        view, coordinator = updated(600.0, 80 * GB)
    assert view.state == "committed", view
    waiting = [line for line in logged if line["event"] == "waiting"]
    assert len(waiting) in (19, 20)
    assert waiting[0] | {"log_level": ""} == {
        "event": "waiting",
        "log_level": "",
        "waiting_for": "e to stage",
        "after_s": 30,
        "at_most_s": 800,
    }
    # The next one may be four times as slow as this one was.
    assert coordinator.hashed_within(80 * GB) == 4 * 600.0
    assert coordinator.digested_within == 4 * 600.0


def test_a_small_version_has_the_time_that_is_set() -> None:
    view, _ = updated(600.0, 1 * GB)
    assert view.state == "failed"
    assert "http://e/weights/stage did not answer within 30 s" in (view.engines[0].why or "")
