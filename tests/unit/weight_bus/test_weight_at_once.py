"""Small versions are staged on the thread that is called, where that need not wait; all others as before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

torch = pytest.importorskip("torch")

from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.errors import SignatureError, StageError  # noqa: E402
from weight_bus.manifest.layout import root_digest  # noqa: E402
from weight_bus.manifest.manifest import Manifest, Source  # noqa: E402
from weight_bus.memory.throttle import BESIDE_DECODING, CpuThrottle  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.receiver.receiver import AT_ONCE_BYTES, Receiver  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

BUCKET = 200
SETTLING_S = 0.1


@pytest.fixture
def publisher(run_id: str) -> Iterator[Publisher]:
    publisher = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), BUCKET)
    yield publisher
    publisher.close()


@pytest.fixture
def target() -> PlainTarget:
    return PlainTarget(make_weights(0))


@pytest.fixture
def receiver(run_id: str, target: PlainTarget) -> Iterator[Receiver]:
    receiver = Receiver(target, run_id, [ShmReader()])
    yield receiver
    receiver.close()


def published(publisher: Publisher, version: int) -> Manifest:
    return publisher.publish(version, make_weights(version)).manifest()


def meet(publisher: Publisher, receiver: Receiver) -> None:
    """Serve versions 1 and 2 from both of the publisher's arenas, so that nothing is left to be set up."""
    for version in (1, 2):
        receiver.stage(published(publisher, version))
        receiver.commit(version)


def assert_serves(target: PlainTarget, seed: int) -> None:
    for name, expected in make_weights(seed).items():
        assert torch.equal(target.live()[name], expected), name


def test_a_small_version_is_staged_here_once_its_source_is_known(
    publisher: Publisher, receiver: Receiver, target: PlainTarget
) -> None:
    first = published(publisher, 1)
    assert receiver.stage_at_once(first) is None, "a mapping has to be made first"
    assert receiver.staged_version is None
    receiver.stage(first)
    receiver.commit(1)
    receiver.stage(published(publisher, 2))
    receiver.commit(2)
    for version in (3, 4, 5):
        manifest = published(publisher, version)
        staged = receiver.stage_at_once(manifest)
        assert staged is not None
        assert (staged.version, staged.root_digest) == (version, manifest.root_digest)
        assert staged.bytes_read == manifest.total_bytes
        assert (receiver.version, receiver.staged_version) == (version - 1, version)
        assert receiver.stage_at_once(manifest) == staged, "asked again: its answer was lost"
        assert_serves(target, version - 1)
        receiver.commit(version)
        assert_serves(target, version)
        assert receiver.digest().root_digest == manifest.root_digest


def test_wrong_bytes_and_missing_signatures_are_refused_here_too(
    run_id: str, publisher: Publisher, receiver: Receiver, target: PlainTarget
) -> None:
    meet(publisher, receiver)
    manifest = published(publisher, 3)
    fourth = published(publisher, 4)
    published(publisher, 5)  # into the arena of version 3
    with pytest.raises(StageError, match="bucket 0 has the hash"):
        receiver.stage_at_once(manifest)
    assert (receiver.version, receiver.staged_version) == (2, None)
    assert_serves(target, 2)
    with pytest.raises(StageError, match="is not newer than 2"):
        receiver.stage_at_once(msgspec.structs.replace(fourth, version=2))
    assert receiver.stage_at_once(fourth) is not None
    receiver.commit(4)
    assert_serves(target, 4)
    strict = Receiver(PlainTarget(make_weights(0)), run_id, [ShmReader()], key="the key of the run")
    with pytest.raises(SignatureError, match="is not signed"):
        strict.stage_at_once(fourth)
    strict.close()


def test_a_large_version_is_left_to_a_thread(run_id: str) -> None:
    rows = AT_ONCE_BYTES // (8 * 4)
    weights = {"embed": torch.zeros(rows, 8), "norm": torch.zeros(16)}
    publisher = Publisher(run_id, weights, "float32", ShmExporter(run_id), 1 << 18)
    receiver = Receiver(PlainTarget(weights), run_id, [ShmReader()])
    for version in (1, 2):
        receiver.stage(publisher.publish(version, weights).manifest())
        receiver.commit(version)
    manifest = publisher.publish(3, weights).manifest()
    assert receiver.stage_at_once(manifest) is None
    assert receiver.staged_version is None
    receiver.close()
    publisher.close()


class SlowReader(ShmReader):
    """Reads when `go_on` is set, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.reading = threading.Event(), threading.Event()
        self.go_on.set()
        self.quick = True

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        self.reading.set()
        assert self.go_on.wait(10)
        super().read(source, offset, out)

    def read_at_once(self, source: Source, offset: int, out: memoryview) -> bool:
        return self.quick and super().read_at_once(source, offset, out)


def test_it_waits_for_no_other_stage_and_supersedes_it(run_id: str, publisher: Publisher, target: PlainTarget) -> None:
    reader = SlowReader()
    receiver = Receiver(target, run_id, [reader])
    meet(publisher, receiver)
    reader.reading.clear()
    reader.go_on.clear()
    old, new = published(publisher, 3), published(publisher, 4)
    ended: list[str] = []

    def stage_old() -> None:
        try:
            receiver.stage(old)
        except StageError as error:
            ended.append(str(error))

    other = threading.Thread(target=stage_old)
    other.start()
    assert reader.reading.wait(10)
    assert receiver.stage_at_once(new) is None
    reader.go_on.set()
    other.join(10)
    assert ended == ["version 3 is superseded by 4"]
    assert receiver.stage_at_once(new) is not None
    receiver.commit(4)
    assert_serves(target, 4)
    receiver.close()


def test_what_cannot_be_read_at_once_is_read_by_a_thread_whole(
    run_id: str, publisher: Publisher, target: PlainTarget
) -> None:
    reader = SlowReader()
    receiver = Receiver(target, run_id, [reader])
    meet(publisher, receiver)
    reader.quick = False
    manifest = published(publisher, 3)
    assert receiver.stage_at_once(manifest) is None
    assert receiver.staged_version is None
    assert_serves(target, 2)
    assert receiver.stage(manifest).bytes_read == manifest.total_bytes
    receiver.commit(3)
    assert_serves(target, 3)
    receiver.close()


def test_a_small_version_takes_no_settling_pause_however_slow_its_bytes_come(
    run_id: str, publisher: Publisher, target: PlainTarget
) -> None:
    class Late(ShmReader):
        def read(self, source: Source, offset: int, out: memoryview) -> None:
            time.sleep(SETTLING_S / publisher_buckets)
            super().read(source, offset, out)

    receiver = Receiver(target, run_id, [Late()])
    manifest = published(publisher, 1)
    publisher_buckets = len(manifest.buckets)
    shortest = 10.0
    for version in (1, 2, 3):
        manifest = manifest if version == 1 else published(publisher, version)
        began = time.monotonic()
        receiver.stage(manifest)
        shortest = min(shortest, time.monotonic() - began)
        receiver.commit(version)
    assert SETTLING_S <= shortest < 2 * SETTLING_S
    receiver.close()


def test_long_work_beside_decoding_is_followed_by_a_pause() -> None:
    def took(share: float, worked_s: float) -> float:
        began = time.monotonic()
        CpuThrottle(share).settle(worked_s)
        return time.monotonic() - began

    assert took(BESIDE_DECODING, SETTLING_S) >= SETTLING_S
    assert took(BESIDE_DECODING, 0.01) < SETTLING_S
    assert took(1.0, SETTLING_S) < SETTLING_S, "a GPU's decoding does not share the memory"


def test_tensors_that_move_between_two_updates_are_found_where_they_are(
    run_id: str, publisher: Publisher, target: PlainTarget
) -> None:
    receiver = Receiver(target, run_id, [ShmReader()])
    meet(publisher, receiver)
    for tensor in target.shadow().values():
        tensor.data = tensor.clone()
    for version in (3, 4):
        assert receiver.stage_at_once(published(publisher, version)) is not None
        receiver.commit(version)
        assert_serves(target, version)
    receiver.close()


class Turned(PlainTarget):
    """`embed` is no contiguous memory: it is read and written through copies."""

    def __init__(self) -> None:
        super().__init__(make_weights(0))
        for weights in (self._live, self._shadow):
            weights["embed"] = weights["embed"].t().contiguous().t()


def test_a_broken_off_update_leaves_nothing_behind_for_the_next(run_id: str, publisher: Publisher) -> None:
    target = Turned()
    receiver = Receiver(target, run_id, [ShmReader()])
    meet(publisher, receiver)
    manifest = published(publisher, 3)
    # All but the last bucket is right, and written.
    buckets = [*manifest.buckets[:-1], msgspec.structs.replace(manifest.buckets[-1], hash="00" * 32)]
    digest = root_digest(bucket.hash for bucket in buckets)
    with pytest.raises(StageError, match=f"bucket {len(buckets) - 1} has the hash"):
        receiver.stage_at_once(msgspec.structs.replace(manifest, buckets=buckets, root_digest=digest))
    for version in (4, 5):
        assert receiver.stage_at_once(published(publisher, version)) is not None
        receiver.commit(version)
        assert_serves(target, version)
    receiver.close()


def test_copies_that_one_delta_was_checked_by_are_not_taken_for_the_next_ones(run_id: str) -> None:
    publisher = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), BUCKET, delta_max_ratio=0.25)
    target = Turned()
    receiver = Receiver(target, run_id, [ShmReader()])
    weights = make_weights(1)
    for version in range(1, 8):
        weights["embed"][version, 2] += 1.0
        manifest = publisher.publish(version, weights).manifest()
        assert (manifest.delta is not None) == (version > 1)
        assert manifest.delta is None or receiver.stage_at_once(manifest) is None
        staged = receiver.stage(manifest)
        assert staged.bytes_read == (manifest.total_bytes if manifest.delta is None else manifest.delta.total_bytes)
        receiver.commit(version)
        for name, expected in weights.items():
            assert torch.equal(target.live()[name], expected), name
    receiver.close()
    publisher.close()
