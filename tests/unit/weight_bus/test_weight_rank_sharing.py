"""The ranks of one engine stage a version together: each reads a part of it, and none serves what was not hashed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

from services.wire.weights_api import StageAnswer  # noqa: E402
from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.errors import StageError  # noqa: E402
from weight_bus.manifest.layout import root_digest  # noqa: E402
from weight_bus.manifest.manifest import Manifest  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.receiver.rank_sharing import RankSharing, sharing_bytes  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.receiver.slices import Slice  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

SPLIT = {"embed": 0, "layer.0.q": 1, "head": 1}
"""Along which dimension; the other tensors every rank has whole."""
SCALE, BUCKET = 900, 40_000
PART = 96 << 10
"""Bytes of a round: a version takes several, buckets lie across their ends."""


def rank_of(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Rank 0 or 1 of two has the lower or the upper part, of unequal size where the whole is odd."""
    return {
        name: tensor.tensor_split(2, SPLIT[name])[rank] if name in SPLIT else tensor for name, tensor in whole.items()
    }


class Engine:
    """Two ranks, each a receiver on a thread, as their own processes would call them."""

    def __init__(self, run_id: str, folder: Path, weights: dict[str, torch.Tensor], deadline_s: float = 60.0) -> None:
        path = folder / "shared"
        path.write_bytes(bytes(sharing_bytes(PART)))
        self.targets = [PlainTarget(rank_of(weights, rank)) for rank in (0, 1)]
        self.prepared: list[Callable[[int], None]] = [lambda _: None, lambda _: None]
        self.ranks = [
            Receiver(
                target,
                run_id,
                [ShmReader()],
                prepare=lambda version, rank=rank: self.prepared[rank](version),
                slices={
                    name: Slice(
                        tuple(weights[name].shape),
                        dim,
                        rank * len(weights[name].tensor_split(2, dim)[0].movedim(dim, 0)),
                    )
                    for name, dim in SPLIT.items()
                },
                sharing=RankSharing(path, rank, 2, deadline_s),
            )
            for rank, target in enumerate(self.targets)
        ]
        self.calls = 0
        self._threads = ThreadPoolExecutor(2)

    def staging(self, manifests: list[Manifest | None]) -> list[Future[StageAnswer]]:
        self.calls += 1
        begun = [
            self._threads.submit(rank.stage, manifest, self.calls)
            for rank, manifest in zip(self.ranks, manifests, strict=True)
            if manifest is not None
        ]
        wait(begun, timeout=60.0)
        return begun

    def stage(self, manifest: Manifest) -> list[StageAnswer]:
        return [each.result(timeout=0.0) for each in self.staging([manifest, manifest])]

    def commit(self, version: int) -> None:
        for rank in self.ranks:
            rank.commit(version)

    def serves(self, expected: dict[str, torch.Tensor], manifest: Manifest) -> None:
        for number, (rank, target) in enumerate(zip(self.ranks, self.targets, strict=True)):
            for name, tensor in rank_of(expected, number).items():
                assert torch.equal(target.live()[name], tensor), (number, name)
            assert rank.digest().root_digest == manifest.root_digest

    def close(self) -> None:
        self._threads.shutdown()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def publisher(run_id: str) -> Iterator[Publisher]:
    publisher = Publisher(
        run_id, make_weights(0, scale=SCALE), "float32", ShmExporter(run_id), BUCKET, delta_max_ratio=0.25
    )
    yield publisher
    publisher.close()


@pytest.fixture
def engine(run_id: str, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(run_id, tmp_path, make_weights(0, scale=SCALE))
    yield engine
    engine.close()


def shares(answers: list[StageAnswer], total: int) -> list[float]:
    return [answer.bytes_read / total for answer in answers]


def test_each_rank_reads_half_and_serves_its_slices_of_all(publisher: Publisher, engine: Engine) -> None:
    for version in range(1, 4):
        weights = make_weights(version, scale=SCALE)
        manifest = publisher.publish(version, weights).manifest()
        read = shares(engine.stage(manifest), manifest.total_bytes)
        assert max(read) <= 0.55
        assert sum(read) == pytest.approx(1.0, abs=0.001)
        engine.commit(version)
        engine.serves(weights, manifest)


def test_a_delta_is_read_in_halves_too_and_what_it_gives_is_hashed(publisher: Publisher, engine: Engine) -> None:
    weights = make_weights(1, scale=SCALE)
    engine.stage(publisher.publish(1, weights).manifest())
    engine.commit(1)
    for version in range(2, 5):
        weights = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor.view(-1)[version::50] += 1.0
        manifest = publisher.publish(version, weights).manifest()
        assert manifest.delta is not None
        answers = engine.stage(manifest)
        assert sum(answer.bytes_read for answer in answers) == manifest.delta.total_bytes
        engine.commit(version)
        engine.serves(weights, manifest)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["norm", "head"])
def test_a_delta_onto_other_bytes_than_its_base_is_found_out_and_dense_bytes_are_taken(
    publisher: Publisher, engine: Engine, rank: int, name: str
) -> None:
    weights = make_weights(1, scale=SCALE)
    engine.stage(publisher.publish(1, weights).manifest())
    engine.commit(1)
    # A bit flipped in one rank's memory, of a slice or of what all ranks have.
    engine.targets[rank].live()[name].view(-1)[3] += 1.0
    weights = {each: tensor.clone() for each, tensor in weights.items()}
    weights["embed"][0, 0] += 1.0
    manifest = publisher.publish(2, weights).manifest()
    assert manifest.delta is not None
    engine.stage(manifest)
    engine.commit(2)
    engine.serves(weights, manifest)


@pytest.mark.parametrize("bucket", [0, 1, -1])
def test_one_wrong_byte_fails_the_stage_of_every_rank(publisher: Publisher, engine: Engine, bucket: int) -> None:
    """Whichever rank hashes the bucket; the old version is served on, and the right one can be staged."""
    first = make_weights(1, scale=SCALE)
    served = publisher.publish(1, first).manifest()
    engine.stage(served)
    engine.commit(1)
    weights = make_weights(2, scale=SCALE)
    manifest = publisher.publish(2, weights).manifest()
    buckets = list(manifest.buckets)
    buckets[bucket] = msgspec.structs.replace(buckets[bucket], hash="0" * 64)
    wrong = msgspec.structs.replace(manifest, buckets=buckets, root_digest=root_digest(each.hash for each in buckets))
    begun = engine.staging([wrong, wrong])
    for each in begun:
        with pytest.raises(StageError, match=r"has the hash|gave up|another attempt"):
            each.result(timeout=0.0)
    engine.serves(first, served)
    engine.stage(manifest)
    engine.commit(2)
    engine.serves(weights, manifest)


def test_a_rank_that_failed_alone_stages_again_without_the_others(publisher: Publisher, engine: Engine) -> None:
    weights = make_weights(1, scale=SCALE)
    manifest = publisher.publish(1, weights).manifest()

    def fails(_: int) -> None:
        raise StageError("no memory for what is derived")

    engine.prepared[1] = fails
    begun = engine.staging([manifest, manifest])
    assert begun[0].result(timeout=0.0).version == 1
    with pytest.raises(StageError, match="no memory"):
        begun[1].result(timeout=0.0)
    engine.prepared[1] = lambda _: None
    answers = engine.stage(manifest)
    assert [answer.bytes_read > 0.9 * manifest.total_bytes for answer in answers] == [False, True]
    engine.commit(1)
    engine.serves(weights, manifest)


def test_a_rank_waits_for_one_that_does_not_come_until_a_deadline_that_names_it(
    run_id: str, publisher: Publisher, tmp_path: Path
) -> None:
    engine = Engine(run_id, tmp_path, make_weights(0, scale=SCALE), deadline_s=0.05)
    manifest = publisher.publish(1, make_weights(1, scale=SCALE)).manifest()
    [alone] = engine.staging([manifest, None])
    with pytest.raises(StageError, match=r"version 1: rank 1 did not come to step 0 within 0\.05 s"):
        alone.result(timeout=0.0)
    engine.close()


def test_a_newer_version_ends_the_wait_for_an_older_one(publisher: Publisher, engine: Engine) -> None:
    older = publisher.publish(1, make_weights(1, scale=SCALE)).manifest()
    engine.calls += 1
    waiting = engine._threads.submit(engine.ranks[0].stage, older, engine.calls)
    weights = make_weights(2, scale=SCALE)
    newer = publisher.publish(2, weights).manifest()
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(rank.stage, newer, engine.calls + 1) for rank in engine.ranks]
        assert {each.result(timeout=60.0).version for each in both} == {2}
    # Whichever it sees first: that its own rank was told of the newer one, or that the other has begun with that.
    with pytest.raises(StageError, match=r"superseded|rank 1 has begun another attempt"):
        waiting.result(timeout=60.0)
    engine.commit(2)
    engine.serves(weights, newer)


def test_ranks_that_do_not_all_share_the_memory_read_everything(
    run_id: str, publisher: Publisher, tmp_path: Path
) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(sharing_bytes(PART)))
    weights = make_weights(1, scale=SCALE)
    sharing = RankSharing(path, 0, 2)
    assert not sharing.complete
    receiver = Receiver(PlainTarget(weights), run_id, [ShmReader()], sharing=sharing)
    manifest = publisher.publish(1, weights).manifest()
    assert receiver.stage(manifest, 1).bytes_read == manifest.total_bytes
    RankSharing(path, 1, 2)
    assert sharing.complete
    receiver.close()
