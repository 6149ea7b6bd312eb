"""The slices that the ranks of one engine keep of a version: theirs of every byte, however the bytes come."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.weight_parts import PlainTarget, make_weights  # noqa: E402
from weight_bus.errors import StageError  # noqa: E402
from weight_bus.manifest.tensors import bytes_under  # noqa: E402
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.receiver.slices import Slice, write_slice  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

SPLIT = {"embed": 0, "layer.0.q": 1, "head": 1}
"""Along which dimension; the other tensors every rank has whole."""
SCALE = 900


@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_whatever_pieces_the_bytes_come_in_a_slice_has_its_own(data: st.DataObject, shape: list[int]) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim]))
    length = data.draw(st.integers(0, shape[dim] - start))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    part = Slice(tuple(shape), dim, start)
    kept = torch.full([length if each == dim else size for each, size in enumerate(shape)], -1, dtype=torch.int16)
    assert part.fits(tuple(kept.shape))

    raw = bytes_under(whole).numpy()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=6)) | {0, len(raw)})
    for begin, end in data.draw(st.permutations(list(pairwise(cuts)))):
        write_slice(kept, part, begin, raw[begin:end].data)
    assert torch.equal(kept, whole.narrow(dim, start, length))


@pytest.mark.parametrize(
    ("shape", "why"), [((4, 5), "another row"), ((3, 6), "beyond the end"), ((3,), "another rank of tensor")]
)
def test_a_tensor_that_cannot_be_the_slice_is_known(shape: tuple[int, ...], why: str) -> None:
    assert not Slice((3, 8), 1, 3).fits(shape), why
    assert Slice((3, 8), 1, 3).fits((3, 5))


def rank_of(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Rank 0 or 1 of two has the lower or the upper part, of unequal size where the whole is odd."""
    return {
        name: tensor.tensor_split(2, SPLIT[name])[rank] if name in SPLIT else tensor for name, tensor in whole.items()
    }


def slices_of(whole: dict[str, torch.Tensor], rank: int) -> dict[str, Slice]:
    starts = {name: rank * whole[name].tensor_split(2, dim)[0].shape[dim] for name, dim in SPLIT.items()}
    return {name: Slice(tuple(whole[name].shape), dim, starts[name]) for name, dim in SPLIT.items()}


@pytest.fixture
def publisher(run_id: str) -> Iterator[Publisher]:
    exporter = ShmExporter(run_id)
    publisher = Publisher(run_id, make_weights(0, scale=SCALE), "float32", exporter, 40_000, delta_max_ratio=0.25)
    yield publisher
    publisher.close()


def assert_serves(target: PlainTarget, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(target.live()[name], tensor), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_its_slices_and_answers_with_the_manifests_digest(
    run_id: str, publisher: Publisher, rank: int
) -> None:
    loaded, second, third = (make_weights(seed, scale=SCALE) for seed in (0, 1, 2))
    target = PlainTarget(rank_of(loaded, rank))
    receiver = Receiver(target, run_id, [ShmReader()], slices=slices_of(loaded, rank))
    before = receiver.digest().root_digest
    manifest = publisher.publish(1, second).manifest()
    assert receiver.stage(manifest).root_digest == manifest.root_digest
    assert receiver.digest().root_digest == before, "what is staged is not served yet"
    receiver.commit(1)
    assert receiver.digest().root_digest == manifest.root_digest
    assert_serves(target, rank_of(second, rank))

    # A step that changes little is offered as a delta from what is served: of slices, only dense bytes are taken.
    little = {name: tensor.clone() for name, tensor in second.items()}
    little["embed"][0, 0] += 1.0
    offered = publisher.publish(2, little).manifest()
    assert offered.delta is not None
    assert receiver.stage(offered).bytes_read == offered.total_bytes
    receiver.commit(2)
    assert receiver.digest().root_digest == offered.root_digest
    assert_serves(target, rank_of(little, rank))
    receiver.rollback(1)
    assert receiver.digest().root_digest == manifest.root_digest

    target.live()["head"][0, 0] += 1.0
    assert receiver.digest().root_digest != manifest.root_digest, "not the bytes that were kept"
    receiver.stage(publisher.publish(3, third).manifest())
    receiver.commit(3)
    assert_serves(target, rank_of(third, rank))
    receiver.close()


def test_a_manifest_of_other_wholes_is_refused_by_name(run_id: str, publisher: Publisher) -> None:
    loaded = make_weights(0, scale=SCALE)
    slices = slices_of(loaded, 0) | {"head": Slice((7, 12_000), 1, 0)}
    receiver = Receiver(PlainTarget(rank_of(loaded, 0)), run_id, [ShmReader()], slices=slices)
    with pytest.raises(StageError, match=r"head is float32\[7, 12000\] here"):
        receiver.stage(publisher.publish(1, loaded).manifest())
    receiver.close()
