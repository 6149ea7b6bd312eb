"""Weights made contiguous stay the same weights, and what is published of them is the same to the last byte."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch")

from trainer.model.learner import named_weights  # noqa: E402
from trainer.sft.tiny_model import build_model  # noqa: E402
from weight_bus.manifest.computed import PublishedTensor  # noqa: E402
from weight_bus.manifest.layout import plan_layout  # noqa: E402
from weight_bus.publisher.arena_buffer import ArenaBuffer  # noqa: E402
from weight_bus.publisher.contiguous import lay_contiguous  # noqa: E402
from weight_bus.publisher.sharding import plan_owner  # noqa: E402
from weight_bus.transports.select import make_exporter  # noqa: E402

LARGE = {"a": (3,), "b": (600, 600), "c": (5, 7), "d": (700, 600), "e": (1,)}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in LARGE.items()}


def origins(weights: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in weights.values()]


def test_they_lie_as_the_layout_says_and_hold_what_they_held() -> None:
    weights, before = tensors(), tensors()
    objects = {name: id(tensor) for name, tensor in weights.items()}
    assert lay_contiguous(weights)
    assert {name: id(tensor) for name, tensor in weights.items()} == objects
    layout = plan_layout(LARGE, "float32")
    base = weights["a"].data_ptr()
    assert [place - base for place in origins(weights)] == [entry.offset for entry in layout.tensors]
    assert all(torch.equal(weights[name], before[name]) for name in LARGE)


def test_a_model_learns_on_as_before_and_its_tied_head_stays_tied() -> None:
    model = build_model(seed=5, hidden_size=32, layers=1)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    moved = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, moved)]
    state = moved.state_dict(keep_vars=True)
    tied = [name for name in state if name not in named_weights(moved)]
    assert tied and lay_contiguous(state)
    assert [name for name in state if name not in named_weights(moved)] == tied
    ids = torch.tensor([[1, 2, 3, 4]])
    for each, optimizer in zip((model, moved), optimizers, strict=True):
        each(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    expected, found = named_weights(model), named_weights(moved)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    layout = plan_layout({name: tuple(tensor.shape) for name, tensor in found.items()}, "float32")
    first = next(iter(found.values())).data_ptr()
    assert [place - first for place in origins(found)] == [entry.offset for entry in layout.tensors]


@pytest.mark.parametrize(
    "odd",
    [
        lambda weights: weights["b"].t(),
        lambda weights: torch.arange(4),
        lambda weights: weights["b"][1:],
        lambda weights: weights["b"].view(torch.float16),
        lambda weights: torch.zeros(0),
    ],
    ids=["turned", "no weights", "part of another", "another dtype", "empty"],
)
def test_what_cannot_be_moved_leaves_all_where_they_are(odd: object) -> None:
    assert callable(odd)
    weights = tensors()
    weights["odd"] = odd(weights)
    before = origins(weights)
    assert not lay_contiguous(weights)
    assert origins(weights) == before
    assert not lay_contiguous({})


@pytest.mark.parametrize("threads", [1, 2])
def test_one_copy_puts_in_place_what_single_copies_do_and_nothing_that_lies_between(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weights = tensors()
        apart = filled(weights)
        lay_contiguous(weights)
        whole = torch.empty(0, dtype=torch.uint8).set_(weights["a"].untyped_storage())
        kept = {name: tensor.clone() for name, tensor in weights.items()}
        whole.fill_(0xEE)
        for name, tensor in kept.items():
            weights[name].copy_(tensor)
        assert filled(weights) == apart
    finally:
        torch.set_num_threads(before)


def filled(weights: Mapping[str, PublishedTensor]) -> bytes:
    exporter = make_exporter("shm", "contiguous")
    try:
        buffer = ArenaBuffer(exporter, plan_owner(weights, "float32", None), torch.float32)
        buffer.fill(weights)
        return bytes(buffer.host(0, buffer.nbytes))
    finally:
        exporter.close()
