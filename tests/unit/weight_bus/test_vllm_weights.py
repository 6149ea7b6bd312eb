"""vLLM's fused parameters by their Hugging Face names, without vLLM: modules that are shaped as its modules are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weight_bus.errors import StageError
from weight_bus.vllm.sets import MirroredSets, ShadowMode
from weight_bus.vllm.weights import VllmWeights, check_linears_are_live, hugging_face_views

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


WAYS: list[tuple[ShadowMode, bool]] = [("device", False), ("device", True), ("pinned", True), ("sparse", True)]
"""Where a version is staged, and whether addresses stay."""
ways = pytest.mark.parametrize(("shadow", "in_place"), WAYS)


@ways
def test_a_flip_serves_the_shadow_everywhere_and_one_back_what_was_before(shadow: ShadowMode, in_place: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    weights = VllmWeights(model, shadow, in_place=in_place)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in weights.live().items()}
    padding = model.embed.weight[VOCABULARY:].clone()
    for tensor in weights.shadow().values():
        tensor.fill_(3.0)
    assert all(torch.equal(weights.live()[name], tensor) for name, tensor in before.items())

    weights.sets.keep()
    weights.flip()
    assert all(bool((tensor == 3.0).all()) for tensor in weights.live().values())
    assert bool((model.attention.qkv_proj.weight == 3.0).all())
    assert bool((model.head.weight[:VOCABULARY] == 3.0).all())  # tied: the head saw the flip, too
    assert torch.equal(model.embed.weight[VOCABULARY:], padding)

    weights.flip_back()
    assert all(torch.equal(weights.live()[name], tensor) for name, tensor in before.items())
    # What was given up can be served again, and be given up again.
    weights.flip()
    assert all(bool((tensor == 3.0).all()) for tensor in weights.live().values())
    weights.flip_back()
    assert all(torch.equal(weights.live()[name], tensor) for name, tensor in before.items())
    # Of several versions the one before, not the first.
    for value in (4.0, 5.0):
        for tensor in weights.shadow().values():
            tensor.fill_(value)
        weights.sets.keep()
        weights.flip()
    weights.flip_back()
    assert all(bool((tensor == 4.0).all()) for tensor in weights.live().values())
    assert not in_place or addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_of_a_version_that_changed_few_words_those_alone_are_copied() -> None:
    torch.manual_seed(1)
    model = Model()
    weights = VllmWeights(model, "sparse", in_place=True)
    # In several parts of each weight.
    sets = weights.sets = MirroredSets(dict(model.named_parameters()), sparse=True, chunk_bytes=64)
    expected = {name: tensor.clone() for name, tensor in weights.live().items()}
    words = 0
    for version in range(1, 6):
        for name, tensor in weights.shadow().items():
            tensor.copy_(expected[name])
        # A NaN is a change once, and none after it.
        for name, value in (("attention.o_proj.weight", float(version)), ("embed.weight", float("nan"))):
            weights.shadow()[name][5 + version % 2, 3] = value
            expected[name][5 + version % 2, 3] = value
        weights.sets.keep()
        weights.flip()
        for name, tensor in weights.live().items():
            assert torch.equal(tensor.view(torch.int32), expected[name].view(torch.int32)), (version, name)
        # A place and a value of 4 bytes each.
        words = 2 if version <= 2 else 1
        assert sets.changed_bytes == 8 * words
    for tensor in weights.shadow().values():
        tensor.fill_(version)
    weights.sets.keep()
    weights.flip()
    assert all(bool((tensor == version).all()) for tensor in weights.live().values())
    # Of so many all were copied.
    assert sets.changed_bytes == 8 * words


@ways
def test_the_shadow_never_aliases_what_is_served(shadow: ShadowMode, in_place: bool) -> None:
    weights = VllmWeights(Model(), shadow, in_place=in_place)
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
        list(hugging_face_views(model, storage))

    model = Model()
    model.attention.o_proj.tp_size = 2
    with pytest.raises(StageError, match=r"attention\.o_proj\.weight of shape \(8, 8\) is split over 2 ranks"):
        VllmWeights(model)


class Rank:
    """A rank's part of a whole model, with the attributes by which vLLM's layers say what they are."""

    def __init__(self, rank: int, ranks: int, kv_heads: int) -> None:
        self.rank, self.ranks, self.kv_heads = rank, ranks, kv_heads
        self.repeated = max(1, ranks // kv_heads)

    def linear(self, whole_in: int, whole_out: int, *, split: int | None, bias: bool = False) -> nn.Linear:
        shares = [self.ranks if split == dim else 1 for dim in (0, 1)]
        layer = nn.Linear(whole_in // shares[1], whole_out // shares[0], bias=bias)
        layer.input_size, layer.output_size = whole_in, whole_out
        layer.tp_size, layer.tp_rank = self.ranks, self.rank
        return layer

    def model(self) -> nn.Module:
        model = Model()
        model.attention.o_proj = self.linear(16, HIDDEN, split=1, bias=True)
        qkv = Fused([16 // self.ranks] + [max(1, self.kv_heads // self.ranks) * 2] * 2)
        # As vLLM says it: rows of all ranks together, also of heads that several ranks hold.
        qkv.output_sizes = [16] + [max(1, self.kv_heads // self.ranks) * 2 * self.ranks] * 2
        qkv.tp_size, qkv.tp_rank, qkv.num_kv_head_replicas = self.ranks, self.rank, self.repeated
        model.attention.qkv_proj = qkv
        model.up = self.linear(HIDDEN, 12, split=0, bias=True)
        model.gate = self.linear(HIDDEN, 4, split=None)
        held = PADDED // self.ranks
        model.embed = Embedding(held, HIDDEN)
        start = min(self.rank * held, VOCABULARY)
        end = min((self.rank + 1) * held, VOCABULARY)
        model.embed.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        model.embed.tp_size, model.embed.tp_rank = self.ranks, self.rank
        model.head = nn.Linear(HIDDEN, held, bias=False)
        model.head.weight = model.embed.weight
        return model


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 4), (2, 1), (4, 2)])
def test_the_slices_of_all_ranks_together_are_the_whole(ranks: int, kv_heads: int) -> None:
    wholes = {
        "embed.weight": (VOCABULARY, HIDDEN),
        "attention.q_proj.weight": (16, HIDDEN),
        "attention.k_proj.weight": (kv_heads * 2, HIDDEN),
        "attention.v_proj.bias": (kv_heads * 2,),
        "attention.o_proj.weight": (HIDDEN, 16),
        "attention.o_proj.bias": (HIDDEN,),
        "up.weight": (12, HIDDEN),
        "up.bias": (12,),
        "gate.weight": (4, HIDDEN),
    }
    covered = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in wholes.items()}
    for rank in range(ranks):
        weights = VllmWeights(Rank(rank, ranks, kv_heads).model())
        assert wholes.keys() <= weights.live().keys()
        assert "attention.o_proj.bias" not in weights.slices
        assert "gate.weight" not in weights.slices
        for name, shape in wholes.items():
            held, part = weights.live()[name], weights.slices.get(name)
            if part is None:
                assert tuple(held.shape) == shape, name
                covered[name] += 1
            else:
                assert part.shape == shape, name
                assert part.fits(tuple(held.shape)), name
                covered[name].narrow(part.dim, part.start, held.shape[part.dim]).add_(1)
    repeated = {
        "attention.k_proj.weight": max(1, ranks // kv_heads),
        "attention.v_proj.bias": max(1, ranks // kv_heads),
    }
    everywhere = {"attention.o_proj.bias": ranks, "gate.weight": ranks}
    for name, times in covered.items():
        assert bool((times == (repeated | everywhere).get(name, 1)).all()), name


def test_a_layer_with_a_packed_copy_is_found_out() -> None:
    model = Model()
    layer = model.attention.o_proj
    layer.cpu_linear = torch.nn.functional.linear
    check_linears_are_live(model)
    packed = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    with pytest.raises(StageError, match=r"attention\.o_proj computes with a packed copy"):
        check_linears_are_live(model)
