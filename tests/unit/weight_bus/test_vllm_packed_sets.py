"""Matrices held packed alone: products, digests and deltas are those of the served version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn

from services.wire.errors import UsageError
from tests.unit.weight_bus.test_vllm_weights import HIDDEN, VOCABULARY, Model
from weight_bus.manifest.manifest import Manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.receiver.buckets import RestoredTensors
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.shm import ShmExporter, ShmReader
from weight_bus.vllm.packed.sets import LEAST_BYTES, PackedMatrix, PackedSets, is_held_packed, packing
from weight_bus.vllm.weights import VllmWeights

pytestmark = pytest.mark.vllm
X = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))


class Untied(Model):
    """Its head has rows of padding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, self.embed.weight.shape[0], bias=False)
        self.head.org_vocab_size = VOCABULARY


def made(kind: type[Model]) -> Model:
    torch.manual_seed(0)
    model = kind().requires_grad_(False)
    for layer in (model.embed, model.attention.qkv_proj, model.attention.o_proj, model.head):
        layer.cpu_linear = nn.functional.linear
    return model


def products(model: Model) -> list[torch.Tensor]:
    fused, out, head = model.attention.qkv_proj, model.attention.o_proj, model.head
    return [
        fused.cpu_linear(X, fused.weight, fused.bias),
        out.cpu_linear(X, out.weight, None),
        head.cpu_linear(X, head.weight, None)[:, :VOCABULARY],
    ]


def expected(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    fused = [torch.cat([weights[f"attention.{part}_proj.{leaf}"] for part in "qkv"]) for leaf in ("weight", "bias")]
    head = weights.get("head.weight", weights["embed.weight"])
    return [X @ fused[0].T + fused[1], X @ weights["attention.o_proj.weight"].T, X @ head.T]


def close(model: Model, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(products(model), expected(weights), strict=True))


def newer(weights: dict[str, torch.Tensor], *, one_in: int = 1) -> dict[str, torch.Tensor]:
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in after.values():
        tensor.view(-1)[::one_in] += 1.5
    return after


class Mesh:
    """A publisher, and a receiver on a model's weights."""

    def __init__(self, model: Model, run_id: str) -> None:
        self.model = model
        self.weights = VllmWeights(model, packed="alone")
        self.receiver = Receiver(self.weights, run_id, [ShmReader()], prepare=lambda _: self.weights.sets.keep())
        self.first = {name: tensor.clone() for name, tensor in self.weights.live().items()}
        self._exporter = ShmExporter(run_id)
        self._publisher = Publisher(run_id, self.first, "float32", self._exporter, 64, delta_max_ratio=0.9)

    def stage(self, version: int, weights: dict[str, torch.Tensor]) -> Manifest:
        manifest = self._publisher.publish(version, weights).manifest()
        self.receiver.stage(manifest)
        return manifest

    def close(self) -> None:
        self.receiver.close()
        self._publisher.close()


@pytest.fixture(params=[Model, Untied], ids=["tied", "untied"])
def mesh(request: pytest.FixtureRequest, run_id: str) -> Iterator[Mesh]:
    mesh = Mesh(made(request.param), run_id)
    yield mesh
    mesh.close()


def test_what_is_served_is_what_was_staged_dense_or_as_a_delta_and_one_step_back(mesh: Mesh) -> None:
    assert mesh.weights.holds_packed
    assert close(mesh.model, mesh.first)
    whole = newer(mesh.first)
    manifest = mesh.stage(1, whole)
    assert manifest.delta is None
    assert close(mesh.model, mesh.first), "staged is not served"
    mesh.receiver.commit(1)
    assert close(mesh.model, whole)
    assert mesh.receiver.digest().root_digest == manifest.root_digest

    few = newer(whole, one_in=5)
    by_delta = mesh.stage(2, few)
    assert by_delta.delta is not None
    mesh.receiver.commit(2)
    assert close(mesh.model, few)
    assert mesh.receiver.digest().root_digest == by_delta.root_digest
    assert all(torch.equal(mesh.weights.live()[name], tensor) for name, tensor in few.items())

    mesh.receiver.rollback(1)
    assert close(mesh.model, whole)
    assert mesh.receiver.digest().root_digest == manifest.root_digest
    third = newer(few, one_in=3)
    mesh.stage(3, third)
    mesh.receiver.commit(3)
    assert close(mesh.model, third)


def test_rows_of_padding_stay_as_they_were(run_id: str) -> None:
    model = made(Untied)
    padding = X @ model.head.weight[VOCABULARY:].T
    mesh = Mesh(model, run_id)
    for version in (1, 2, 3):
        mesh.stage(version, newer(mesh.first, one_in=version))
        mesh.receiver.commit(version)
        assert torch.allclose(model.head.cpu_linear(X, model.head.weight, None)[:, VOCABULARY:], padding, atol=1e-5)
    mesh.close()


def test_an_embedding_that_is_looked_up_stays_plain_and_is_packed_beside_once_it_is_multiplied_by(run_id: str) -> None:
    model = made(Model)
    mesh = Mesh(model, run_id)
    held = mesh.weights.sets.held.beside
    assert "embed.weight" not in mesh.weights.sets.held_alone
    products(model)
    after = newer(mesh.first)
    mesh.stage(1, after)
    mesh.receiver.commit(1)
    assert torch.equal(model.embed.weight[:VOCABULARY], after["embed.weight"])
    assert mesh.weights.sets.held.beside > held
    assert model.embed.cpu_linear.served is None, "nobody multiplies by it through the embedding"
    mesh.close()


def test_a_weight_that_is_held_packed_is_not_a_number_where_it_is_read_past_the_product() -> None:
    model = made(Model)
    VllmWeights(model, packed="alone")
    assert bool(model.attention.o_proj.weight.isnan().all())
    assert model.attention.o_proj.weight.untyped_storage().nbytes() == 4, "vLLM's own copy is gone"


def test_a_model_is_given_back_as_it_was_and_can_be_written_in_place_until_the_next_flip(mesh: Mesh) -> None:
    mesh.weights.unpack()
    assert close(mesh.model, mesh.first)
    other = newer(mesh.first)
    for name, tensor in mesh.weights.in_place().items():
        tensor.copy_(other[name])
    assert close(mesh.model, other)
    again = newer(other)
    mesh.stage(1, again)
    mesh.receiver.commit(1)
    assert close(mesh.model, again)
    mesh.weights.give_back()
    assert mesh.model.attention.o_proj.cpu_linear is nn.functional.linear
    assert close(mesh.model, again)
    assert VllmWeights(mesh.model, packed="alone").holds_packed, "and another run's weights can be made of it"


def test_few_tensors_are_restored_at_a_time() -> None:
    """Else a digest would make a whole set."""
    weights = VllmWeights(made(Model), packed="alone")
    live = weights.live()
    assert isinstance(live, RestoredTensors)
    assert live["attention.q_proj.weight"].untyped_storage().data_ptr() == (
        live["attention.k_proj.weight"].untyped_storage().data_ptr()
    )
    first = live["attention.q_proj.weight"]
    assert live["attention.o_proj.weight"].shape == (HIDDEN, 8)
    assert live["attention.q_proj.weight"] is not first, "the last one is kept, and no other"


@pytest.mark.parametrize("shape", [(1, 7), (37, 65), (96, 80), (257, 640)])
def test_a_matrix_comes_back_to_the_bit(shape: tuple[int, int]) -> None:
    weights = torch.randn(2, *shape) * torch.logspace(-40, 30, shape[1])
    matrix = PackedMatrix(weights[0])
    assert torch.equal(matrix.restored(), weights[0])
    matrix.plain.copy_(weights[1])
    matrix.pack()
    assert torch.equal(matrix.restored(), weights[1])


def test_views_of_a_matrix_keep_its_memory() -> None:
    plain = PackedMatrix(torch.ones(64, 64)).plain
    others = [PackedMatrix(torch.full((64, 64), 2.0)) for _ in range(50)]
    plain.fill_(3.0)
    assert all(torch.equal(other.restored(), torch.full((64, 64), 2.0)) for other in others)


def test_who_is_held_packed() -> None:
    model = made(Model)
    parameters = dict(model.named_parameters())
    layers = {"attention.o_proj.weight": [model.attention.o_proj]}
    assert is_held_packed("alone", parameters, layers)
    for asked in ("auto", "beside", "off"):
        assert not is_held_packed(asked, parameters, layers), "a small model is not, of itself"
    large = {"attention.o_proj.weight": torch.empty(LEAST_BYTES // 4, 1)}
    assert is_held_packed("auto", large, layers)
    assert not is_held_packed("beside", large, layers)
    # No kernels for it.
    assert not is_held_packed("alone", {name: tensor.double() for name, tensor in parameters.items()}, layers)
    assert not is_held_packed("alone", parameters, {})
    with pytest.raises(UsageError, match=r"ROLLMESH_WEIGHTS_PACKED=0: .*\n?.*auto, alone, beside, off"):
        packing("0")


def test_other_places_hold_plain_sets() -> None:
    assert not VllmWeights(made(Model), "pinned", packed="alone").holds_packed
    assert not VllmWeights(made(Model), in_place=True, packed="alone").holds_packed
    assert isinstance(VllmWeights(made(Model), packed="alone").sets, PackedSets)
