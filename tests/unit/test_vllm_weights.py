"""vLLM's fused parameters by their Hugging Face names, without vLLM: modules that are shaped as its modules are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weight_bus.errors import StageError
from weight_bus.vllm_weights import VllmWeights, check_linears_are_live, hugging_face_views

HIDDEN, VOCABULARY, PADDED = 8, 10, 16


class Embedding(nn.Embedding):
    """Rows of padding at the end, as vLLM's VocabParallelEmbedding has them."""

    org_vocab_size = VOCABULARY


class Fused(nn.Linear):
    def __init__(self, output_sizes: list[int]) -> None:
        super().__init__(HIDDEN, sum(output_sizes))
        self.output_sizes = output_sizes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = Fused([8, 4, 4])
        self.o_proj = nn.Linear(8, HIDDEN, bias=False)


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012 - as vLLM has it

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(PADDED, HIDDEN)
        self.attention = Attention()
        self.head = nn.Linear(HIDDEN, PADDED, bias=False)
        self.head.weight = self.embed.weight


def test_fused_weights_split_by_rows_and_a_tied_head_appears_once() -> None:
    model = Model()
    live = VllmWeights(model).live()
    shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
    assert shapes == {
        "embed.weight": (VOCABULARY, HIDDEN),
        "attention.q_proj.weight": (8, HIDDEN),
        "attention.k_proj.weight": (4, HIDDEN),
        "attention.v_proj.weight": (4, HIDDEN),
        "attention.q_proj.bias": (8,),
        "attention.k_proj.bias": (4,),
        "attention.v_proj.bias": (4,),
        "attention.o_proj.weight": (HIDDEN, 8),
    }
    fused = model.attention.qkv_proj.weight
    assert torch.equal(live["attention.k_proj.weight"], fused[8:12])
    live["attention.v_proj.weight"].fill_(7.0)
    assert bool((fused[12:] == 7.0).all())


def test_a_flip_serves_the_shadow_everywhere_and_a_second_one_comes_back() -> None:
    torch.manual_seed(0)
    model = Model()
    weights = VllmWeights(model)
    before = {name: tensor.clone() for name, tensor in weights.live().items()}
    padding = model.embed.weight[VOCABULARY:].clone()
    for tensor in weights.shadow().values():
        tensor.fill_(3.0)
    assert all(torch.equal(weights.live()[name], tensor) for name, tensor in before.items())

    weights.flip()
    assert all(bool((tensor == 3.0).all()) for tensor in weights.live().values())
    assert bool((model.attention.qkv_proj.weight == 3.0).all())
    assert bool((model.head.weight[:VOCABULARY] == 3.0).all())  # tied: the head saw the flip, too
    assert torch.equal(model.embed.weight[VOCABULARY:], padding)

    weights.flip()
    assert all(torch.equal(weights.live()[name], tensor) for name, tensor in before.items())


def test_the_shadow_never_aliases_what_is_served() -> None:
    weights = VllmWeights(Model())
    for _ in range(3):
        served = {tensor.untyped_storage().data_ptr() for tensor in weights.live().values()}
        spare = {tensor.untyped_storage().data_ptr() for tensor in weights.shadow().values()}
        assert not served & spare
        weights.flip()


def test_what_cannot_be_replaced_is_named() -> None:
    model = Model()
    model.attention.qkv_proj.output_sizes = [8, 8]
    with pytest.raises(StageError, match=r"attention\.qkv_proj\.weight.*does not split into q_proj, k_proj, v_proj"):
        VllmWeights(model)

    model = Model()
    model.attention.o_proj.weight = nn.Parameter(torch.empty(0))
    with pytest.raises(StageError, match=r"packed attention\.o_proj\.weight away"):
        VllmWeights(model)

    model = Model()
    storage = {name: tensor.detach() for name, tensor in model.named_parameters()}
    storage["attention.o_proj.weight"] = torch.zeros(8, 8, dtype=torch.int8)
    with pytest.raises(StageError, match=r"attention\.o_proj\.weight is quantised"):
        dict(hugging_face_views(model, storage))

    model = Model()
    model.attention.o_proj.tp_size = 2
    with pytest.raises(StageError, match=r"attention\.o_proj\.weight is split over 2 ranks"):
        VllmWeights(model)


def test_a_layer_with_a_packed_copy_is_found_out() -> None:
    model = Model()
    layer = model.attention.o_proj
    layer.cpu_linear = torch.nn.functional.linear
    check_linears_are_live(model)
    packed = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    with pytest.raises(StageError, match=r"attention\.o_proj computes with a packed copy"):
        check_linears_are_live(model)
