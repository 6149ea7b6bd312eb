"""Publish → stage → commit: all of one version or all of another, byte for byte, whatever goes wrong on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

torch = pytest.importorskip("torch")

from services.wire.errors import ConflictError, UsageError, WireError  # noqa: E402
from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.errors import StageError, TransportError  # noqa: E402
from weight_bus.manifest.layout import hash_bytes, root_digest  # noqa: E402
from weight_bus.manifest.manifest import Manifest, Owner, Source  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

BUCKET = 200
"""No multiple of the alignment: tensors lie across buckets."""


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


def assert_serves(target: PlainTarget, seed: int) -> None:
    for name, expected in make_weights(seed).items():
        assert torch.equal(target.live()[name], expected), name


def test_a_version_arrives_byte_for_byte_and_only_at_the_commit(
    publisher: Publisher, receiver: Receiver, target: PlainTarget
) -> None:
    for version in (1, 2, 3):
        manifest = publisher.publish(version, make_weights(version)).manifest()
        staged = receiver.stage(manifest)
        assert (staged.version, staged.root_digest) == (version, manifest.root_digest)
        assert staged.bytes_read == manifest.layout.total_bytes
        assert (receiver.version, receiver.staged_version) == (version - 1, version)
        assert_serves(target, version - 1)
        receiver.commit(version)
        assert (receiver.version, receiver.staged_version) == (version, None)
        assert_serves(target, version)
        assert receiver.digest().root_digest == manifest.root_digest


def test_what_an_engine_makes_of_a_version_is_ready_before_it_counts_as_staged(
    run_id: str, publisher: Publisher, target: PlainTarget
) -> None:
    prepared: list[tuple[int, int | None]] = []

    def prepare(version: int) -> None:
        prepared.append((version, receiver.staged_version))
        if version == 1:
            raise StageError("no room")

    receiver = Receiver(target, run_id, [ShmReader()], prepare=prepare)
    with pytest.raises(StageError, match="no room"):
        receiver.stage(publisher.publish(1, make_weights(1)).manifest())
    assert receiver.staged_version is None
    assert_serves(target, 0)
    manifest = publisher.publish(2, make_weights(2)).manifest()
    receiver.stage(manifest)
    receiver.stage(manifest)
    assert prepared == [(1, None), (2, None)], "what is staged already is not made again"
    receiver.commit(2)
    assert_serves(target, 2)
    receiver.close()


def test_weights_are_cast_to_the_serving_dtype_once(run_id: str) -> None:
    target = PlainTarget(make_weights(0), torch.bfloat16)
    publisher = Publisher(run_id, make_weights(0), "bfloat16", ShmExporter(run_id), BUCKET)
    receiver = Receiver(target, run_id, [ShmReader()])
    try:
        manifest = publisher.publish(1, make_weights(1)).manifest()
        receiver.stage(manifest)
        receiver.commit(1)
        for name, expected in make_weights(1).items():
            assert torch.equal(target.live()[name], expected.to(torch.bfloat16))
        assert receiver.digest().root_digest == manifest.root_digest
    finally:
        receiver.close()
        publisher.close()


def test_views_that_are_not_contiguous_are_filled_and_hashed_too(run_id: str, publisher: Publisher) -> None:
    class Fused(PlainTarget):
        """`embed` is served as a transposed view of another tensor, as a fused or packed layer would."""

        def __init__(self) -> None:
            super().__init__(make_weights(0))
            for weights in (self._live, self._shadow):
                weights["embed"] = weights["embed"].t().contiguous().t()

    target = Fused()
    assert not target.live()["embed"].is_contiguous()
    receiver = Receiver(target, run_id, [ShmReader()])
    manifest = publisher.publish(1, make_weights(1)).manifest()
    receiver.stage(manifest)
    receiver.commit(1)
    assert_serves(target, 1)
    assert receiver.digest().root_digest == manifest.root_digest
    receiver.close()


def test_the_digest_before_any_commit_is_that_of_the_first_weights(publisher: Publisher, receiver: Receiver) -> None:
    """One bucket of default size, as the target names its tensors."""
    other = Receiver(PlainTarget(make_weights(0)), "r", [])
    assert receiver.digest().root_digest == other.digest().root_digest
    assert Receiver(PlainTarget(make_weights(1)), "r", []).digest() != other.digest().root_digest


def test_the_digest_is_of_what_is_really_served(publisher: Publisher, receiver: Receiver, target: PlainTarget) -> None:
    manifest = publisher.publish(1, make_weights(1)).manifest()
    receiver.stage(manifest)
    receiver.commit(1)
    target.live()["norm"][3] += 1e-3
    assert receiver.digest().root_digest != manifest.root_digest


class LyingReader(ShmReader):
    """Flips one bit in the bucket at `offset`, or fails there."""

    def __init__(self, offset: int, error: TransportError | None = None) -> None:
        super().__init__()
        self.offset, self.error = offset, error

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        super().read(source, offset, out)
        if offset == self.offset:
            if self.error:
                raise self.error
            out[-1] ^= 1


@pytest.mark.parametrize(
    ("reader", "said"),
    [
        (LyingReader(0), "bucket 0 has the hash"),
        (LyingReader(2 * BUCKET), "bucket 2 has the hash"),
        (LyingReader(2 * BUCKET, TransportError("peer gone")), "could not be read .peer gone"),
    ],
)
def test_a_bad_bucket_leaves_the_old_version_serving(
    run_id: str, publisher: Publisher, target: PlainTarget, reader: LyingReader, said: str
) -> None:
    receiver = Receiver(target, run_id, [reader])
    manifest = publisher.publish(1, make_weights(1)).manifest()
    with pytest.raises(StageError, match=said):
        receiver.stage(manifest)
    assert (receiver.version, receiver.staged_version, target.flips) == (0, None, 0)
    assert_serves(target, 0)
    with pytest.raises(ConflictError, match="nothing is staged"):
        receiver.commit(1)
    reader.offset = -1
    receiver.stage(manifest)
    receiver.commit(1)
    assert_serves(target, 1)
    receiver.close()


def test_a_failed_stage_takes_an_older_staged_version_with_it(
    publisher: Publisher, receiver: Receiver, target: PlainTarget
) -> None:
    """Its bytes lie half overwritten in the shadow: nobody may commit them."""
    receiver.stage(publisher.publish(1, make_weights(1)).manifest())
    second = publisher.publish(2, make_weights(2)).manifest()
    wrong = msgspec.structs.replace(second.buckets[-1], hash=hash_bytes(b""))
    buckets = [*second.buckets[:-1], wrong]
    broken = msgspec.structs.replace(second, buckets=buckets, root_digest=root_digest(b.hash for b in buckets))
    with pytest.raises(StageError, match="has the hash"):
        receiver.stage(broken)
    with pytest.raises(ConflictError):
        receiver.commit(1)
    assert_serves(target, 0)


def test_a_receiver_two_versions_behind_notices_that_its_arena_was_overwritten(
    publisher: Publisher, receiver: Receiver, target: PlainTarget
) -> None:
    old = publisher.publish(1, make_weights(1)).manifest()
    publisher.publish(2, make_weights(2)).manifest()
    receiver.stage(old)  # one behind is still whole
    publisher.publish(3, make_weights(3)).manifest()
    other = Receiver(target, old.run_id, [ShmReader()])
    with pytest.raises(StageError, match="has the hash"):
        other.stage(old)


def test_a_newer_version_supersedes_a_staged_one(publisher: Publisher, receiver: Receiver, target: PlainTarget) -> None:
    first = publisher.publish(1, make_weights(1)).manifest()
    receiver.stage(first)
    receiver.stage(publisher.publish(2, make_weights(2)).manifest())
    with pytest.raises(ConflictError, match="version 2 is staged, 0 served"):
        receiver.commit(1)
    with pytest.raises(StageError, match="superseded by 2"):
        receiver.stage(first)
    receiver.commit(2)
    assert_serves(target, 2)


class GatedReader(ShmReader):
    """Waits at the first bucket until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.buckets = 0

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        self.reached.set()
        assert self.go_on.wait(10)
        self.buckets += 1
        super().read(source, offset, out)


def test_a_newer_version_ends_a_stage_under_way_and_nothing_mixes(
    run_id: str, publisher: Publisher, target: PlainTarget
) -> None:
    reader = GatedReader()
    receiver = Receiver(target, run_id, [reader])
    said: list[str] = []

    def stage(manifest: Manifest) -> None:
        try:
            receiver.stage(manifest)
        except StageError as error:
            said.append(str(error))

    first = threading.Thread(target=stage, args=(publisher.publish(1, make_weights(1)).manifest(),))
    first.start()
    assert reader.reached.wait(10)
    second = threading.Thread(target=stage, args=(publisher.publish(2, make_weights(2)).manifest(),))
    second.start()
    with pytest.raises(ConflictError):
        receiver.commit(1)
    while receiver._wanted != 2:
        second.join(0.001)
    reader.go_on.set()
    first.join(10)
    second.join(10)
    assert said == ["version 1 is superseded by 2"]
    receiver.commit(2)
    assert_serves(target, 2)
    # Bytes for a version that nobody wants any more are not pulled.
    assert reader.buckets == 1 + len(publisher.publish(2, make_weights(2)).manifest().buckets)
    receiver.close()


def test_the_same_version_asked_for_again_is_answered_from_memory(publisher: Publisher, receiver: Receiver) -> None:
    manifest = publisher.publish(1, make_weights(1)).manifest()
    assert receiver.stage(manifest) is receiver.stage(manifest)
    receiver.commit(1)
    with pytest.raises(StageError, match="version 1 is not newer than 1, which is served"):
        receiver.stage(manifest)


def test_what_does_not_fit_this_engine_is_refused(run_id: str, publisher: Publisher, target: PlainTarget) -> None:
    manifest = publisher.publish(4, make_weights(1)).manifest()
    receiver = Receiver(target, run_id, [ShmReader()], version=2)
    replace = msgspec.structs.replace
    half = PlainTarget(make_weights(0), torch.bfloat16)
    fewer = PlainTarget({name: tensor for name, tensor in make_weights(0).items() if name != "norm"})
    reordered = replace(manifest.layout, digest="0" * 64)
    shifted = replace(
        manifest.layout, tensors=[*manifest.layout.tensors[:-1], replace(manifest.layout.tensors[-1], offset=0)]
    )
    cases: list[tuple[Receiver, Manifest, type[Exception], str]] = [
        (receiver, replace(manifest, run_id="other"), StageError, "run 'other' came to an engine of run"),
        (receiver, replace(manifest, version=2), StageError, "version 2 is not newer than 2"),
        (receiver, replace(manifest, base_version=1), WireError, "base version 1 contradict the delta"),
        (receiver, replace(manifest, root_digest="0" * 64), StageError, "root digest does not follow"),
        (
            receiver,
            replace(manifest, owners=[Owner(total_bytes=manifest.total_bytes, sources=[])]),
            StageError,
            "no source can be read",
        ),
        (receiver, replace(manifest, buckets=manifest.buckets[1:]), WireError, "expected 0"),
        (receiver, replace(manifest, layout=reordered), StageError, "offsets are not those"),
        (receiver, replace(manifest, layout=shifted), StageError, "offsets are not those"),
        (Receiver(half, run_id, [ShmReader()]), manifest, StageError, r"embed is bfloat16\[13, 7\] here, float32"),
        (Receiver(fewer, run_id, [ShmReader()]), manifest, StageError, "lacks nothing and names norm"),
    ]
    for refusing, wrong, kind, said in cases:
        with pytest.raises(kind, match=said):
            refusing.stage(wrong)
    assert_serves(target, 0)
    receiver.stage(manifest)
    receiver.commit(4)
    assert_serves(target, 1)


def test_a_published_version_is_never_reused_with_other_bytes(publisher: Publisher) -> None:
    manifest = publisher.publish(5, make_weights(5)).manifest()
    assert publisher.publish(5, make_weights(5)).manifest() == manifest
    with pytest.raises(ConflictError, match="version 5 is published with other bytes"):
        publisher.publish(5, make_weights(6)).manifest()
    with pytest.raises(ConflictError, match="version 4 is older than 5"):
        publisher.publish(4, make_weights(4)).manifest()


def test_a_refused_reuse_leaves_the_published_bytes_readable(
    publisher: Publisher, receiver: Receiver, target: PlainTarget
) -> None:
    manifest = publisher.publish(1, make_weights(1)).manifest()
    with pytest.raises(ConflictError):
        publisher.publish(1, make_weights(9)).manifest()
    receiver.stage(manifest)
    receiver.commit(1)
    assert_serves(target, 1)


def test_other_names_or_shapes_than_planned_are_refused(publisher: Publisher) -> None:
    weights = make_weights(1)
    with pytest.raises(UsageError, match="4 tensors to publish, 5 planned"):
        publisher.publish(1, {name: weights[name] for name in list(weights)[1:]}).manifest()
    with pytest.raises(UsageError, match="tensor norm is of shape"):
        publisher.publish(1, weights | {"norm": torch.zeros(12)}).manifest()


def test_equal_weights_have_equal_digests_in_any_arena(run_id: str, publisher: Publisher) -> None:
    """Padding is zero, so the digest follows from the tensors alone, also after the arena held others."""
    for version in (1, 2, 3):
        publisher.publish(version, make_weights(version)).manifest()
    fresh = Publisher(run_id, make_weights(0), "float32", ShmExporter(run_id), BUCKET)
    assert (
        fresh.publish(9, make_weights(4)).manifest().root_digest
        == publisher.publish(4, make_weights(4)).manifest().root_digest
    )
    fresh.close()
