"""Weight updates of the trainer: announced as soon as the step's record is durable, and never before."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import structlog

from services.wire.weights_api import EngineProgress, UpdateView
from tests.support.quick_clock import quickly
from tests.support.until import until
from trainer.io_loop import Background
from trainer.weights import WeightUpdates, _result_of
from weight_bus.manifest.manifest import Bucket, Layout, Manifest, Owner
from weight_bus.publisher.publisher import Publication


def manifest_of(version: int) -> Manifest:
    return Manifest(
        run_id="r",
        version=version,
        layout=Layout(tensors=[], total_bytes=4, digest="l"),
        owners=[Owner(total_bytes=4, sources=[])],
        buckets=[Bucket(offset=0, length=4, hash="bb" * 32)],
        root_digest=f"digest-{version}",
    )


class Made(Publication):
    """Its manifest is made while somebody waits for it, or when the test says so."""

    def __init__(self, version: int, *, quick: bool) -> None:
        super().__init__(version, Future())
        self.quick = quick
        self.waited_s = 0.0

    def wait(self, timeout_s: float) -> None:
        self.waited_s += timeout_s
        if self.quick:
            self.make()

    def make(self) -> None:
        self.future.set_result(manifest_of(self.version))


class PretendPublisher:
    def __init__(self, total_bytes: int, *, quick: bool) -> None:
        self.layout = Layout(tensors=[], total_bytes=total_bytes, digest="l")
        self.latest: Manifest | None = None
        self.made: list[Made] = []
        self.released: list[int] = []
        self._quick = quick

    def publish(self, version: int, tensors: Any, *, leased: bool = False) -> Made:
        self.made.append(Made(version, quick=self._quick))
        if not leased and self._quick:
            self.made[-1].make()
        return self.made[-1]

    def release(self, version: int) -> None:
        self.released.append(version)


class PretendBus:
    def __init__(self) -> None:
        self.announced: list[int] = []

    async def announce(self, manifest: Manifest, *, wait_s: float = 0.0) -> UpdateView:
        self.announced.append(manifest.version)
        return UpdateView(
            version=manifest.version,
            state="committed",
            root_digest=manifest.root_digest,
            engines=[],
            publish_to_commit_ms=1.0,
        )


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


def updates_of(publisher: PretendPublisher, bus: PretendBus, background: Background) -> WeightUpdates:
    return WeightUpdates(publisher, bus, background, stage_s=10.0, write_down=lambda *_: done())  # type: ignore[arg-type]


def done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


async def test_nobody_hears_of_a_version_before_its_step_is_durable(background: Background) -> None:
    publisher, bus = PretendPublisher(1000, quick=True), PretendBus()
    updates = updates_of(publisher, bus, background)
    durable: Future[None] = Future()
    updates.publish(1, {}, durable)
    await asyncio.sleep(0.05)
    assert publisher.made[0].future.done() and bus.announced == [] and publisher.released == []
    durable.set_result(None)
    await until(lambda: updates.committed == 1, 5.0)
    assert (bus.announced, publisher.released) == ([1], [1])
    broken: Future[None] = Future()
    broken.set_exception(OSError("the disk is gone"))
    updates.publish(2, {}, broken)
    await until(lambda: publisher.released == [1, 2], 5.0)
    # The buffer is released within the task; that it failed is noted once it has ended, on the loop's own thread.
    await until(lambda: _failure_of(background) is not None, 5.0)
    assert bus.announced == [1]
    with pytest.raises(OSError, match="the disk is gone"):
        background.check()


def _failure_of(background: Background) -> Exception | None:
    try:
        background.check()
    except OSError as error:
        return error
    return None


async def test_the_training_thread_gives_way_for_small_weights_alone_and_not_for_long(background: Background) -> None:
    bus = PretendBus()
    small = PretendPublisher(500_000, quick=True)
    updates_of(small, bus, background).publish(1, {}, done())
    assert small.made[0].future.done()
    slow = PretendPublisher(500_000, quick=False)
    updates_of(slow, bus, background).publish(1, {}, done())
    assert 0 < slow.made[0].waited_s < 0.01
    large = PretendPublisher(500_000_000, quick=True)
    updates_of(large, bus, background).publish(1, {}, done())
    assert large.made[0].waited_s == 0
    for publication in (slow.made[0], large.made[0]):
        publication.make()
    await until(lambda: bus.announced == [1, 1, 1], 5.0)


def test_what_is_there_takes_no_turn_of_the_loop() -> None:
    future: Future[int] = Future()
    future.set_result(7)
    with pytest.raises(StopIteration) as ended:
        _result_of(future).send(None)
    assert ended.value.value == 7


async def test_what_is_not_there_yet_is_waited_for_and_what_was_given_up_is_cancelled() -> None:
    future: Future[int] = Future()
    waiting = asyncio.create_task(_result_of(future))
    await asyncio.sleep(0)
    future.set_result(8)
    assert await waiting == 8
    given_up: Future[int] = Future()
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await _result_of(given_up)


def test_threads_of_a_trainer_take_turns(background: Background) -> None:
    assert sys.getswitchinterval() <= 0.001


class SlowFleet(PretendBus):
    """No engine serves before so many seconds have passed on its loop; until then each announcement fails."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s = after_s

    async def announce(self, manifest: Manifest, *, wait_s: float = 0.0) -> UpdateView:
        view = await super().announce(manifest, wait_s=wait_s)
        if asyncio.get_running_loop().time() >= self.after_s:
            return view
        return view.model_copy(update={"state": "failed", "engines": []})


class QuickBackground:
    """Does the work at once, on a loop whose clock jumps. `given_s`: the deadline it was called with."""

    given_s = took_s = 0.0

    def call(self, work: Any, name: str, deadline_s: float) -> Any:
        self.given_s = deadline_s
        result, self.took_s = quickly(lambda: work)
        return result


def test_engines_that_start_for_ten_minutes_are_waited_for_with_the_first_version() -> None:
    fleet, background = SlowFleet(600.0), QuickBackground()
    updates = updates_of(PretendPublisher(1000, quick=True), fleet, background)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logged:
        updates.publish_first(0, {}, 1800.0)
    assert 600.0 <= background.took_s < 601.0 < background.given_s
    assert updates.newest_state == (0, "committed")
    waiting = [line for line in logged if line["event"] == "waiting"]
    assert waiting[0]["waiting_for"] == "engines to serve version 0"
    assert waiting[0]["why"] == "no engine"


def test_the_bus_has_as_long_for_a_version_as_its_bytes_take_and_longer_where_they_were_slow(
    background: Background,
) -> None:
    updates = updates_of(PretendPublisher(100 * 10**9, quick=True), PretendBus(), background)
    assert updates._settle_s == 4 * 1000.0 + 5.0
    assert updates.verified_within == 2 * 1000.0
    slow = EngineProgress(engine_id="e", state="committed", bytes_read=100 * 10**9, stage_ms=900_000.0)
    updates._note(UpdateView(version=1, state="committed", root_digest="d", engines=[slow]))
    assert updates._settle_s == 4 * 3600.0 + 5.0
