"""Packed copies of weights: a product is always that of the version that is served."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

pytest.importorskip("vllm")

import torch
from torch import nn

from weight_bus.vllm.packed.layers import PackedLayers, can_pack

pytestmark = pytest.mark.vllm
X = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Two layers as vLLM leaves them on a CPU, the second tied to an embedding, and one that is no linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 24)
        self.first = nn.Linear(24, 16, bias=False)
        self.head = nn.Linear(24, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(24)
        for layer in (self.first, self.head):
            layer.cpu_linear = nn.functional.linear

    def products(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [layer.cpu_linear(X, layer.weight, None) for layer in (self.first, self.head)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    import vllm._custom_ops  # noqa: F401 - registers the kernels

    if not can_pack(torch.float32):
        pytest.skip("this vLLM has no packed products")


def storage(model: Model) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def serve(model: Model, weights: dict[str, torch.Tensor]) -> None:
    """What a flip of the parameters does."""
    for name, parameter in model.named_parameters():
        parameter.data = weights[name]


def expected(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [X @ weights["first.weight"].T, X @ weights["embedding.weight"].T]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def newer(model: Model) -> dict[str, torch.Tensor]:
    return {name: tensor + 1.0 for name, tensor in storage(model).items()}


def test_a_version_is_served_from_the_copies_packed_for_it() -> None:
    model = Model()
    packed, new = PackedLayers(model), newer(model)
    packed.pack(7, new)
    assert close(model.products(), expected(storage(model)))
    serve(model, new)
    packed.flip(7)
    assert close(model.products(), expected(new))
    assert all(layer.cpu_linear.packed is not None for layer in (model.first, model.head))


def test_copies_of_another_version_are_never_served() -> None:
    model = Model()
    packed, new = PackedLayers(model), newer(model)
    packed.pack(7, storage(model))
    serve(model, new)
    packed.flip(8)
    assert close(model.products(), expected(new))
    packed.flip(7)
    assert close(model.products(), expected(new))


def test_a_superseded_version_that_is_packed_late_does_not_take_the_newer_ones_place() -> None:
    model = Model()
    packed, new = PackedLayers(model), newer(model)
    packed.pack(8, new)
    packed.pack(7, storage(model))
    serve(model, new)
    packed.flip(8)
    assert close(model.products(), expected(new))
    assert model.first.cpu_linear.packed is not None


def test_without_packed_copies_layers_use_their_live_weights() -> None:
    model = Model()
    packed, new = PackedLayers(model, linears=False), newer(model)
    packed.pack(7, new)
    serve(model, new)
    packed.flip(7)
    assert close(model.products(), expected(new))
    assert model.first.cpu_linear is nn.functional.linear


def test_layers_that_are_given_back_multiply_as_before_and_can_be_packed_for_another_run() -> None:
    model = Model()
    first, new = PackedLayers(model), newer(model)
    first.pack(7, new)
    serve(model, new)
    first.flip(7)
    first.unpack()
    assert model.first.cpu_linear.packed is None and close(model.products(), expected(new))
    first.give_back()
    assert model.first.cpu_linear is model.head.cpu_linear is nn.functional.linear
    second = PackedLayers(model)
    second.pack(0, new)
    second.flip(0)
    assert close(model.products(), expected(new)) and model.head.cpu_linear.packed is not None


class Counted(dict[str, torch.Tensor]):
    """Weights that count how often they are read; the third read, the first for packing, waits for `go_on`."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.reads, self.begun, self.go_on = 0, Event(), Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads += 1
        if self.reads == 3:
            self.begun.set()
            assert self.go_on.wait(20.0)
        return super().__getitem__(name)


def test_a_newer_version_ends_the_packing_of_an_older_one() -> None:
    """Else the copies of three versions would lie in memory at once."""
    model = Model()
    packed, new = PackedLayers(model), newer(model)
    old = Counted(storage(model))
    with ThreadPoolExecutor(2) as threads:
        older = threads.submit(packed.pack, 7, old)
        assert old.begun.wait(20.0)
        newest = threads.submit(packed.pack, 8, new)
        while packed._newest != 8:
            time.sleep(0.001)
        old.go_on.set()
        older.result(20.0)
        newest.result(20.0)
    assert old.reads == 3, "its second layer was not packed any more"
    serve(model, new)
    packed.flip(8)
    assert close(model.products(), expected(new))
    assert all(layer.cpu_linear.packed is not None for layer in (model.first, model.head))


def test_packed_copies_do_not_follow_the_memory_they_were_packed_from() -> None:
    """The shadow is written over by the next stage while these are served."""
    model = Model()
    packed, new = PackedLayers(model), newer(model)
    wanted = expected(new)
    packed.pack(7, new)
    packed.flip(7)
    for tensor in new.values():
        tensor.zero_()
    assert close(model.products(), wanted)


def test_a_dtype_without_packed_products_is_multiplied_as_it_is() -> None:
    """As 16 bits are on a CPU without AVX-512."""
    assert not can_pack(torch.float64)
    model = Model().double()
    layers = PackedLayers(model)
    weights = storage(model)
    layers.pack(1, weights)
    layers.flip(1)
    with torch.no_grad():
        x = X.double()
        for layer, weight in ((model.first, weights["first.weight"]), (model.head, weights["embedding.weight"])):
            assert torch.equal(layer.cpu_linear(x, layer.weight, None), torch.nn.functional.linear(x, weight))
    layers.close()
