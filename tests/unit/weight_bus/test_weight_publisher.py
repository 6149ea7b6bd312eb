"""Publishing: bytes in place at once, manifests in the background, buffers kept as long as somebody needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from services.wire.errors import ConflictError, DeadlineError, NotReadyError, UsageError  # noqa: E402
from tests.weight_parts import make_weights  # noqa: E402
from weight_bus.errors import TransportError  # noqa: E402
from weight_bus.manifest.delta import apply, decode  # noqa: E402
from weight_bus.manifest.layout import hash_bytes, root_digest  # noqa: E402
from weight_bus.manifest.manifest import (  # noqa: E402
    Delta,
    Manifest,
    ShmSource,
    Source,
    check_manifest,
    check_signature,
)
from weight_bus.manifest.tensors import dtype_of, flat_bytes, tensor_at  # noqa: E402
from weight_bus.memory.arena import Arena, private_arena  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402

BUCKET = 4096
WEIGHTS = {"embed": (64, 700), "norm": (700,), "head": (700, 64)}


class OpenExporter:
    """Private memory that the test looks into. `gate`: cleared, nothing is exported and so no manifest is made."""

    name = "shm"

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.failure: Exception | None = None

    def allocate(self, nbytes: int) -> Arena:
        self.arenas.append(private_arena(nbytes))
        return self.arenas[-1]

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:
        self.reached.set()
        assert self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        return ShmSource(path=str(self.arenas.index(arena)), length=arena.nbytes, host="here")

    def close(self) -> None:
        return

    def bytes_of(self, source: Source) -> memoryview:
        assert isinstance(source, ShmSource)
        return self.arenas[int(source.path)].view


@pytest.fixture
def exporter() -> OpenExporter:
    return OpenExporter()


@pytest.fixture
def publisher(exporter: OpenExporter) -> Iterator[Publisher]:
    publisher = Publisher("r", weights(0), "float32", exporter, BUCKET, wait_s=0.2)
    yield publisher
    exporter.gate.set()
    publisher.close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in WEIGHTS.items()}


def dense_bytes(exporter: OpenExporter, manifest: Manifest) -> memoryview:
    """What the manifest's arena holds now; every bucket's hash must be right."""
    (owner,) = manifest.owners
    view = exporter.bytes_of(owner.sources[0])
    for bucket in manifest.buckets:
        assert hash_bytes(view[bucket.offset : bucket.offset + bucket.length]) == bucket.hash
    assert root_digest(bucket.hash for bucket in manifest.buckets) == manifest.root_digest
    return view


def test_publish_returns_before_the_manifest_and_with_the_bytes_in_place(
    exporter: OpenExporter, publisher: Publisher
) -> None:
    exporter.gate.clear()
    given = weights(1)
    publication = publisher.publish(1, given)
    assert publisher.latest is None and not publication.future.done()
    with pytest.raises(DeadlineError, match="manifest of version 1 took longer than 0"):
        publication.manifest(0.01)
    for tensor in given.values():
        # The optimizer's next step: what was published must not change with it.
        tensor.zero_()
    exporter.gate.set()
    manifest = publication.manifest()
    assert publisher.latest is manifest
    check_manifest(manifest)
    view = dense_bytes(exporter, manifest)
    for entry in manifest.layout.tensors:
        expected = weights(1)[entry.name].numpy().tobytes()
        assert bytes(view[entry.offset : entry.offset + entry.nbytes]) == expected


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_tensors_are_copied_as_small_ones_are(exporter: OpenExporter, threads: int, dtype: str) -> None:
    """Also those that lie otherwise in memory, of another dtype than is served, or with a gradient."""
    side = 600  # 1.44 MB: past the caches, where its bytes are what is served
    tensors = {
        "plain": torch.randn(side, side, requires_grad=True),
        "turned": torch.randn(side, side).t(),
        "half": torch.randn(side, side, 2).to(torch.bfloat16),
        "part": torch.randn(side, side + 1)[:, 1:],
        "small": torch.randn(3),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    publisher = Publisher("r", tensors, dtype, exporter, BUCKET)
    try:
        flat = flat_bytes(dense_bytes(exporter, publisher.publish(1, tensors).manifest()))
        for entry in publisher.layout.tensors:
            expected = tensors[entry.name].detach().to(dtype_of(dtype))
            assert torch.equal(tensor_at(flat, entry), expected), entry.name
    finally:
        torch.set_num_threads(before)
        publisher.close()


def test_the_version_before_stays_whole_until_the_one_after_next(exporter: OpenExporter, publisher: Publisher) -> None:
    manifests = [publisher.publish(version, weights(version)).manifest() for version in (2, 4, 8)]
    assert bytes(dense_bytes(exporter, manifests[1])[:4]) == weights(4)["embed"].numpy().tobytes()[:4]
    dense_bytes(exporter, manifests[2])
    with pytest.raises(AssertionError):
        dense_bytes(exporter, manifests[0])


def test_a_leased_version_holds_back_the_one_after_next(exporter: OpenExporter, publisher: Publisher) -> None:
    first = publisher.publish(1, weights(1), leased=True).manifest()
    publisher.publish(2, weights(2), leased=True).manifest()
    with pytest.raises(
        DeadlineError, match=r"version 3 found no arena free for 0.2 s: version 1, announced and not settled"
    ):
        publisher.publish(3, weights(3))
    dense_bytes(exporter, first)
    # Refused for want of room, not used up: the version can be had later.
    waiting = threading.Timer(0.05, publisher.release, [1])
    waiting.start()
    third = publisher.publish(3, weights(3)).manifest()
    waiting.join()
    dense_bytes(exporter, third)


def test_with_one_arena_a_version_waits_until_the_one_before_has_settled(exporter: OpenExporter) -> None:
    publisher = Publisher("r", weights(0), "float32", exporter, BUCKET, wait_s=0.2, buffers=1)
    first = publisher.publish(1, weights(1), leased=True).manifest()
    with pytest.raises(DeadlineError, match=r"no arena free for 0.2 s: version 1, announced and not settled"):
        publisher.publish(2, weights(2))
    dense_bytes(exporter, first)
    publisher.release(1)
    second = publisher.publish(2, weights(2)).manifest()
    dense_bytes(exporter, second)
    with pytest.raises(AssertionError):
        dense_bytes(exporter, first)
    assert publisher.publish(2, weights(2)).manifest() is second
    dense_bytes(exporter, second)
    assert publisher.held_bytes == sum(arena.nbytes for arena in exporter.arenas) < 2 * first.layout.total_bytes
    publisher.close()
    with pytest.raises(UsageError, match="one arena keeps no version that a delta could be to"):
        Publisher("r", weights(0), "float32", exporter, BUCKET, buffers=1, delta_max_ratio=0.5)


def test_a_half_that_is_still_being_hashed_is_not_written_over(exporter: OpenExporter, publisher: Publisher) -> None:
    exporter.gate.clear()
    first = publisher.publish(1, weights(1))
    second = publisher.publish(2, weights(2))
    with pytest.raises(DeadlineError, match="version 1, being hashed"):
        publisher.publish(3, weights(3))
    exporter.gate.set()
    assert [first.manifest().version, second.manifest().version] == [1, 2]
    dense_bytes(exporter, first.manifest())
    assert publisher.publish(3, weights(3)).manifest().version == 3


def test_a_version_is_one_set_of_bytes_for_ever(exporter: OpenExporter, publisher: Publisher) -> None:
    publisher.publish(4, weights(4)).manifest()
    manifest = publisher.publish(5, weights(5), leased=True).manifest()
    assert publisher.publish(5, weights(5)).manifest() is manifest
    with pytest.raises(ConflictError, match="version 5 is published with other bytes"):
        publisher.publish(5, weights(6)).manifest()
    with pytest.raises(ConflictError, match="version 4 is older than 5"):
        publisher.publish(4, weights(4))
    dense_bytes(exporter, manifest)
    assert publisher.latest is manifest
    # The next version must leave alone what is leased.
    dense_bytes(exporter, publisher.publish(6, weights(6)).manifest())
    dense_bytes(exporter, manifest)


def test_a_digest_is_told_before_anybody_can_read_the_bytes(exporter: OpenExporter, publisher: Publisher) -> None:
    publisher.publish(4, weights(4), leased=True).manifest()
    exporter.reached.clear()
    digest = publisher.digest(5, weights(5))
    assert not exporter.reached.is_set()
    assert publisher.latest is not None and publisher.latest.version == 4
    dense_bytes(exporter, publisher.latest)
    assert publisher.publish(5, weights(5)).manifest().root_digest == digest
    publisher.release(4)
    assert publisher.digest(6, weights(6)) != digest
    dense_bytes(exporter, publisher.publish(6, weights(6)).manifest())


def test_a_manifest_that_cannot_be_made_gives_its_lease_back(exporter: OpenExporter, publisher: Publisher) -> None:
    exporter.failure = TransportError("no way out")
    failed = publisher.publish(1, weights(1), leased=True)
    with pytest.raises(TransportError, match="no way out"):
        failed.manifest()
    assert publisher.latest is None
    exporter.failure = None
    with pytest.raises(ConflictError, match="version 1 could not be published at first"):
        publisher.publish(1, weights(1)).manifest()
    for version in (2, 3, 4):
        dense_bytes(exporter, publisher.publish(version, weights(version)).manifest())


def test_a_copy_that_fails_uses_up_neither_version_nor_half(exporter: OpenExporter, publisher: Publisher) -> None:
    broken: dict[str, Any] = weights(1) | {"norm": torch.empty(700, device="meta")}
    for _ in range(3):
        with pytest.raises((RuntimeError, NotImplementedError)):
            publisher.publish(1, broken, leased=True)
    dense_bytes(exporter, publisher.publish(1, weights(1)).manifest())
    dense_bytes(exporter, publisher.publish(2, weights(2)).manifest())


def test_a_closed_publisher_says_so(exporter: OpenExporter) -> None:
    publisher = Publisher("r", weights(0), "float32", exporter, BUCKET)
    exporter.gate.clear()
    first, second = publisher.publish(1, weights(1)), publisher.publish(2, weights(2))
    assert exporter.reached.wait(10)
    letting = threading.Timer(0.05, exporter.gate.set)
    letting.start()
    publisher.close()
    letting.join()
    assert first.manifest().version == 1
    with pytest.raises(NotReadyError, match="closed before version 2 had a manifest"):
        second.manifest()
    with pytest.raises(UsageError, match="publisher is closed"):
        publisher.publish(3, weights(3))


def test_manifests_bear_the_runs_signature(exporter: OpenExporter) -> None:
    publisher = Publisher("r", weights(0), "float32", exporter, BUCKET, key="the key of the run")
    check_signature(publisher.publish(1, weights(1)).manifest(), "the key of the run")
    publisher.close()


def nudged(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Some elements moved by more than bfloat16 rounds away, a NaN and a negative zero among them."""
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor * 1.5 + 0.01, tensor)
        for name, tensor in tensors.items()
    }
    moved["norm"][0], moved["norm"][1] = float("nan"), -0.0
    return moved


def applied(exporter: OpenExporter, delta: Delta, base: bytes) -> bytes:
    target = bytearray(base)
    (part,) = delta.parts
    for bucket in part.buckets:
        code = exporter.bytes_of(part.sources[0])[bucket.offset : bucket.offset + bucket.length]
        assert hash_bytes(code) == bucket.hash
        piece = memoryview(target)[bucket.target_offset : bucket.target_offset + bucket.target_length]
        apply(decode(code, bucket.target_length), piece)
    return bytes(target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sparse_change_is_offered_as_a_delta_too_and_ends_with_the_same_bytes(
    exporter: OpenExporter, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_bus.publisher.delta_maker.TARGET_BYTES", 64 << 10)
    publisher = Publisher("r", weights(0), dtype, exporter, BUCKET, delta_max_ratio=0.25)
    served = weights(0)
    base = publisher.publish(1, served).manifest()
    assert (base.kind, base.delta) == ("dense", None)
    for version in (2, 3, 4):
        before = bytes(dense_bytes(exporter, base))
        served = nudged(served, 0.01, version)
        manifest = publisher.publish(version, served).manifest()
        check_manifest(manifest)
        delta = manifest.delta
        assert manifest.kind == "delta" and delta is not None
        assert (delta.base_version, delta.base_digest) == (version - 1, base.root_digest)
        assert 0 < delta.total_bytes < 0.05 * manifest.total_bytes
        assert applied(exporter, delta, before) == bytes(dense_bytes(exporter, manifest))
        base = manifest
    same = publisher.publish(5, served).manifest()
    assert same.delta is not None and same.delta.total_bytes == 0 and same.root_digest == base.root_digest
    publisher.close()


def test_no_delta_where_too_much_changed_or_its_base_is_gone(exporter: OpenExporter) -> None:
    publisher = Publisher("r", weights(0), "float32", exporter, BUCKET, delta_max_ratio=0.25)
    publisher.publish(1, weights(1)).manifest()
    assert publisher.publish(2, weights(2)).manifest().delta is None
    # Nobody pays for delta arenas before one is of use.
    assert len(exporter.arenas) == 2
    # Repeating version 2 takes the buffer where version 1 was.
    publisher.publish(2, weights(2)).manifest()
    third = publisher.publish(3, nudged(weights(2), 0.01, 3)).manifest()
    assert third.delta is not None and third.delta.base_digest != third.root_digest
    publisher.close()


def test_a_trainer_that_waits_is_let_in_before_a_delta_is_done(
    exporter: OpenExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher("r", weights(0), "float32", exporter, BUCKET, delta_max_ratio=0.25, wait_s=10)
    publisher.publish(1, weights(1)).manifest()
    exporter.gate.clear()
    second = publisher.publish(2, nudged(weights(1), 0.01, 2))
    # Version 2 hangs before its delta is begun; version 3 wants the buffer where its base lies, and gets it.
    third = publisher.publish(3, nudged(weights(1), 0.02, 3))
    exporter.gate.set()
    assert second.manifest().delta is None
    delta = third.manifest().delta
    assert delta is not None and delta.base_version == 2
    publisher.close()


def test_weights_smaller_than_a_sample_are_compared_whole(exporter: OpenExporter) -> None:
    publisher = Publisher("r", make_weights(0), "float32", exporter, 200, delta_max_ratio=0.25)
    first = publisher.publish(1, make_weights(1)).manifest()
    before = bytes(dense_bytes(exporter, first))
    moved = make_weights(1)
    moved["norm"][3] += 1
    delta = publisher.publish(2, moved).manifest().delta
    assert delta is not None and publisher.latest is not None
    assert applied(exporter, delta, before) == bytes(dense_bytes(exporter, publisher.latest))
    publisher.close()
