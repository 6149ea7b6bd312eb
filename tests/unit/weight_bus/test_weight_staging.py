"""Ways into the shadow: several owners, deltas, other sources; and one step back out of it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from structlog.testing import capture_logs

torch = pytest.importorskip("torch")

from services.wire.errors import ConflictError  # noqa: E402
from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.errors import SignatureError, StageError, TransportError  # noqa: E402
from weight_bus.manifest.delta import encode  # noqa: E402
from weight_bus.manifest.layout import hash_bytes, plan_buckets, plan_layout, root_digest  # noqa: E402
from weight_bus.manifest.manifest import (  # noqa: E402
    Bucket,
    Delta,
    DeltaBucket,
    DeltaPart,
    Manifest,
    Owner,
    Shard,
    Source,
    sign,
)
from weight_bus.memory.arena import Arena  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.receiver.buckets import (  # noqa: E402
    BucketPlan,
    Memory,
    digest_of,
)
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.receiver.weight_slots import WeightSlots, Whole  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

BUCKET = 40_000
SCALE = 900
"""Tensors from a scalar to 47 KB and 327 KB: small ones through scratch, large ones in place."""
KEY = "the weight key of this run"


def weights(seed: int) -> dict[str, torch.Tensor]:
    return make_weights(seed, scale=SCALE)


def step(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A few elements of each tensor changed."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        tensor.view(-1)[:: max(1, tensor.numel() // 7)] += 1.0
    return after


def assert_serves(target: PlainTarget, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(target.live()[name], tensor), name


def assert_all_read(read: int, manifest: Manifest) -> None:
    """Every tensor's bytes, and no more than lies in the arenas: padding may be passed over."""
    assert sum(entry.nbytes for entry in manifest.layout.tensors) <= read <= manifest.total_bytes


@pytest.fixture
def exporter(run_id: str) -> Iterator[ShmExporter]:
    exporter = ShmExporter(run_id)
    yield exporter
    exporter.close()


@pytest.fixture
def target() -> PlainTarget:
    return PlainTarget(weights(0))


def put(exporter: ShmExporter, data: bytes) -> tuple[Arena, Source]:
    arena = exporter.allocate(len(data))
    arena.view[:] = data
    return arena, exporter.export(arena)


def two_owners(run_id: str, version: int, tensors: dict[str, torch.Tensor], exporter: ShmExporter) -> Manifest:
    """Every tensor's bytes cut in two at an odd place; the halves lie in two arenas, in opposite orders."""
    layout = plan_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, "float32")
    owners, canonical = [], bytearray(layout.total_bytes)
    for number in (0, 1):
        shards, data = [], b""
        indices = range(len(layout.tensors))
        for index in indices if number == 0 else reversed(indices):
            entry = layout.tensors[index]
            whole = tensors[entry.name].numpy().tobytes()
            canonical[entry.offset : entry.offset + entry.nbytes] = whole
            cut = len(whole) // 8 * 4 or len(whole)
            part = whole[:cut] if number == 0 else whole[cut:]
            if part:
                shards.append(
                    Shard(tensor=index, tensor_offset=0 if number == 0 else cut, offset=len(data), nbytes=len(part))
                )
                data += part + bytes(-len(part) % 64)
        _, source = put(exporter, data)
        owners.append(Owner(total_bytes=len(data), sources=[source], shards=shards))
    buckets = [
        Bucket(offset=start, length=length, hash=hash_bytes(bytes(canonical[start : start + length])))
        for start, length in plan_buckets(len(canonical), BUCKET)
    ]
    return Manifest(
        run_id=run_id,
        version=version,
        layout=layout,
        owners=owners,
        buckets=buckets,
        root_digest=root_digest(bucket.hash for bucket in buckets),
    )


def with_delta(
    manifest: Manifest, base: Manifest, old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], out: ShmExporter
) -> Manifest:
    """The manifest with a delta from `base`, in ranges of 64 KiB of each owner's arena."""
    parts = []
    for owner in manifest.owners:
        flat = []
        for tensors in (old, new):
            arena = bytearray(owner.total_bytes)
            for shard in owner.shards or ():
                whole = tensors[manifest.layout.tensors[shard.tensor].name].numpy().tobytes()
                arena[shard.offset : shard.offset + shard.nbytes] = whole[shard.tensor_offset :][: shard.nbytes]
            flat.append(bytes(arena))
        data, buckets = b"", []
        for start, length in plan_buckets(owner.total_bytes, 64 << 10):
            code = encode(flat[0][start : start + length], flat[1][start : start + length], 4)
            if code:
                buckets.append(
                    DeltaBucket(
                        offset=len(data),
                        length=len(code),
                        hash=hash_bytes(code),
                        target_offset=start,
                        target_length=length,
                    )
                )
                data += code
        parts.append(DeltaPart(total_bytes=len(data), sources=[put(out, data)[1]], buckets=buckets))
    delta = Delta(base_version=base.version, base_digest=base.root_digest, parts=parts)
    return msgspec.structs.replace(manifest, kind="delta", base_version=base.version, delta=delta)


def without_dense(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(
        manifest, owners=[msgspec.structs.replace(owner, sources=[]) for owner in manifest.owners]
    )


def test_a_version_of_two_owners_arrives_whole(run_id: str, exporter: ShmExporter, target: PlainTarget) -> None:
    receiver = Receiver(target, run_id, [ShmReader()])
    for version in (1, 2):
        manifest = two_owners(run_id, version, weights(version), exporter)
        staged = receiver.stage(manifest)
        assert_all_read(staged.bytes_read, manifest)
        receiver.commit(version)
        assert_serves(target, weights(version))
        assert receiver.digest().root_digest == manifest.root_digest
    receiver.close()


def test_a_wrong_byte_of_the_second_owner_keeps_the_version_from_being_staged(
    run_id: str, exporter: ShmExporter, target: PlainTarget
) -> None:
    manifest = two_owners(run_id, 1, weights(1), exporter)
    exporter._arenas[1].view[-200] ^= 1
    receiver = Receiver(target, run_id, [ShmReader()])
    with pytest.raises(StageError, match="has the hash"):
        receiver.stage(manifest)
    assert_serves(target, weights(0))
    receiver.close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_delta_is_taken_from_the_base_that_is_served(run_id: str, exporter: ShmExporter, *, fused: bool) -> None:
    target = PlainTarget(weights(0))
    if fused:  # as a layer would be whose weight is a view that is not contiguous
        for tensors in (target._live, target._shadow):
            tensors["embed"] = tensors["embed"].t().contiguous().t()
    receiver = Receiver(target, run_id, [ShmReader()])
    before, base = weights(1), two_owners(run_id, 1, weights(1), exporter)
    receiver.stage(base)
    receiver.commit(1)
    for version in (2, 3):
        after = step(before)
        dense = two_owners(run_id, version, after, exporter)
        offered = without_dense(with_delta(dense, base, before, after, exporter))
        assert offered.delta is not None
        staged = receiver.stage(offered)
        assert staged.bytes_read == offered.delta.total_bytes < offered.total_bytes / 10
        assert_serves(target, before)
        receiver.commit(version)
        assert_serves(target, after)
        assert receiver.digest().root_digest == dense.root_digest
        before, base = after, dense
    receiver.close()


def test_what_a_publisher_offers_as_a_delta_is_taken(run_id: str) -> None:
    target = PlainTarget(weights(0))
    publisher = Publisher(run_id, weights(0), "float32", ShmExporter(run_id), BUCKET, delta_max_ratio=0.25)
    receiver = Receiver(target, run_id, [ShmReader()])
    served = weights(1)
    for version in (1, 2, 3):
        manifest = publisher.publish(version, served).manifest()
        read = receiver.stage(manifest).bytes_read
        receiver.commit(version)
        publisher.release(version)
        assert_serves(target, served)
        assert receiver.digest().root_digest == manifest.root_digest
        assert (read < manifest.total_bytes / 4) == (version > 1)
        served = step(served)
    receiver.close()
    publisher.close()


def test_the_weights_an_engine_was_loaded_with_are_a_base_too(
    run_id: str, exporter: ShmExporter, target: PlainTarget
) -> None:
    base = two_owners(run_id, 0, weights(0), exporter)
    dense = two_owners(run_id, 1, step(weights(0)), exporter)
    receiver = Receiver(target, run_id, [ShmReader()])
    staged = receiver.stage(without_dense(with_delta(dense, base, weights(0), step(weights(0)), exporter)))
    assert staged.bytes_read < dense.total_bytes / 10
    receiver.commit(1)
    assert_serves(target, step(weights(0)))
    receiver.close()


def test_another_base_takes_the_dense_bytes_or_fails(run_id: str, exporter: ShmExporter, target: PlainTarget) -> None:
    base = two_owners(run_id, 0, weights(7), exporter)  # not what this engine has loaded
    dense = two_owners(run_id, 1, step(weights(7)), exporter)
    offered = with_delta(dense, base, weights(7), step(weights(7)), exporter)
    receiver = Receiver(target, run_id, [ShmReader()])
    with pytest.raises(StageError, match="no source can be read"):
        receiver.stage(without_dense(offered))
    assert_all_read(receiver.stage(offered).bytes_read, offered)
    receiver.commit(1)
    assert_serves(target, step(weights(7)))
    receiver.close()


def test_a_broken_delta_falls_back_on_the_dense_bytes(run_id: str, exporter: ShmExporter, target: PlainTarget) -> None:
    base = two_owners(run_id, 0, weights(0), exporter)
    after = step(weights(0))
    dense = two_owners(run_id, 1, after, exporter)
    good = with_delta(dense, base, weights(0), after, exporter)
    # Sound by its own hash, but it changes another word than it should.
    wrong = with_delta(dense, base, weights(0), step(step(weights(0))), exporter)
    receiver = Receiver(target, run_id, [ShmReader()])
    with pytest.raises(StageError, match="has the hash"):
        receiver.stage(without_dense(wrong))
    assert_serves(target, weights(0))
    assert_all_read(receiver.stage(wrong).bytes_read, wrong)
    receiver.commit(1)
    assert_serves(target, after)
    assert good.root_digest == wrong.root_digest
    receiver.close()


def test_a_delta_that_cannot_be_reached_is_no_warning(run_id: str, exporter: ShmExporter, target: PlainTarget) -> None:
    base, after = two_owners(run_id, 0, weights(0), exporter), step(weights(0))
    offered = with_delta(two_owners(run_id, 1, after, exporter), base, weights(0), after, exporter)
    assert offered.delta is not None
    parts = [msgspec.structs.replace(part, sources=[]) for part in offered.delta.parts]
    unreachable = msgspec.structs.replace(offered, delta=msgspec.structs.replace(offered.delta, parts=parts))
    receiver = Receiver(target, run_id, [ShmReader()])
    with capture_logs() as lines:
        receiver.stage(unreachable)
    receiver.commit(1)
    assert_serves(target, after)
    told = [line["log_level"] for line in lines if "delta" in str(line["event"])]
    assert told == ["info"], "a healthy run has no warning of it"
    receiver.close()


class GoneReader(ShmReader):
    def read(self, source: Source, offset: int, out: memoryview) -> None:
        raise TransportError("the peer is gone")


def test_a_source_that_cannot_be_read_is_passed_over_for_another(
    run_id: str, exporter: ShmExporter, target: PlainTarget
) -> None:
    receiver = Receiver(target, run_id, [GoneReader(), ShmReader()])
    receiver.stage(two_owners(run_id, 1, weights(1), exporter))
    receiver.commit(1)
    assert_serves(target, weights(1))
    receiver.close()


def test_only_manifests_with_the_key_s_signature_are_taken(run_id: str, exporter: ShmExporter) -> None:
    target = PlainTarget(weights(0))
    receiver = Receiver(target, run_id, [ShmReader()], key=KEY)
    manifest = two_owners(run_id, 1, weights(1), exporter)
    for wrong in (manifest, sign(manifest, "another key"), msgspec.structs.replace(sign(manifest, KEY), version=2)):
        with pytest.raises(SignatureError):
            receiver.stage(wrong)
    receiver.stage(sign(manifest, KEY))
    receiver.commit(1)
    assert_serves(target, weights(1))
    receiver.close()


def test_one_step_back_is_kept_until_the_next_version_is_written(run_id: str) -> None:
    target = PlainTarget(weights(0))
    publisher = Publisher(run_id, weights(0), "float32", ShmExporter(run_id), BUCKET)
    receiver = Receiver(target, run_id, [ShmReader()])
    loaded = receiver.digest().root_digest
    with pytest.raises(ConflictError, match="nothing is kept beside 0"):
        receiver.rollback(5)
    manifest = publisher.publish(1, weights(1)).manifest()
    receiver.stage(manifest)
    with pytest.raises(ConflictError, match="-1 cannot be served again"):
        receiver.rollback(-1)
    receiver.commit(1)
    receiver.rollback(0)
    receiver.rollback(0)  # its answer was lost
    assert (receiver.version, receiver.kept_version, receiver.digest().root_digest) == (0, None, loaded)
    assert_serves(target, weights(0))
    with pytest.raises(ConflictError, match="nothing is staged"):
        receiver.commit(1)
    assert receiver.stage(manifest).bytes_read == 0
    receiver.commit(1)
    assert_serves(target, weights(1))
    second = publisher.publish(2, weights(2)).manifest()
    broken = msgspec.structs.replace(
        second, buckets=[msgspec.structs.replace(bucket, hash="0" * 64) for bucket in second.buckets]
    )
    broken = msgspec.structs.replace(broken, root_digest=root_digest(bucket.hash for bucket in broken.buckets))
    assert receiver.kept_version == 0
    with pytest.raises(StageError, match="has the hash"):
        receiver.stage(broken)
    with pytest.raises(ConflictError, match="nothing is kept beside 1"):
        receiver.rollback(0)
    assert_serves(target, weights(1))
    receiver.close()
    publisher.close()


def test_a_flip_is_undone_by_another_and_a_refusal_says_what_is_kept() -> None:
    old, new = Whole(1, "a"), Whole(2, "b")
    staged = WeightSlots(old).with_staged(new)
    flipped = staged.committed(2)
    assert (flipped.served, flipped.kept) == (new, old)
    with pytest.raises(ConflictError, match="version 7 cannot be served again: version 1 is kept, 2 served"):
        flipped.rolled_back(7)
    undone = flipped.undone()
    assert (undone.served, undone.kept, undone.staged, undone.has(2, "b")) == (old, None, None, True)
    with pytest.raises(ConflictError, match="version 1 is served, back from 2"):
        undone.rolled_back(2)
    assert undone.undone() == flipped
    assert undone == flipped.rolled_back(1)
    for nothing_flipped in (WeightSlots(old), staged, flipped.writing()):
        assert nothing_flipped.undone() == nothing_flipped


def test_a_delta_is_no_longer_taken_once_its_base_was_rolled_back(run_id: str, exporter: ShmExporter) -> None:
    target = PlainTarget(weights(0))
    receiver = Receiver(target, run_id, [ShmReader()])
    base = two_owners(run_id, 1, weights(1), exporter)
    receiver.stage(base)
    receiver.commit(1)
    receiver.rollback(0)
    dense = two_owners(run_id, 2, step(weights(1)), exporter)
    offered = with_delta(dense, base, weights(1), step(weights(1)), exporter)
    assert_all_read(receiver.stage(offered).bytes_read, dense)
    receiver.commit(2)
    assert_serves(target, step(weights(1)))
    receiver.close()


def test_bytes_of_tensors_that_are_not_contiguous_are_read_and_written(run_id: str, exporter: ShmExporter) -> None:
    manifest = two_owners(run_id, 1, weights(1), exporter)
    plan = BucketPlan.of_manifest(manifest)
    turned = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in weights(1).items()}
    assert not turned["embed"].is_contiguous()
    assert digest_of(plan, turned) == digest_of(plan, weights(1)) == manifest.root_digest
    memory = Memory(plan.layout, turned)
    memory.copy_from(Memory(plan.layout, weights(2)), lambda: None)
    assert torch.equal(turned["embed"], weights(2)["embed"])
