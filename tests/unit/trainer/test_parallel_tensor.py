"""Weights on several ranks, by the plans of transformers, give the logprobs and gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from services.config.training.lora import LoraSettings
from services.wire.errors import UsageError
from tests.support.parallel_models import Arrays, a_model, found_by, gradients, largest_error, summed
from tests.support.rank_pool import RankPool
from tests.unit.trainer.test_trainer_packed_forward import a_model as a_model_of_another_kind
from trainer.model.adapters import Adapters
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.tensor import tensor_parallel, tensor_plan


def mesh_of(name: str = "tensor") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def placements(model: PreTrainedModel) -> dict[str, str]:
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if placement.is_replicate():
                continue
            split = getattr(placement, "split_factor", None)
            found[name] = f"{placement.dim}" if split is None else f"{placement.dim}/{split}"
            local = parameter.to_local()
            assert local.untyped_storage().nbytes() == local.numel() * local.itemsize, "the whole is let go of"
    return found


def of_rank(rank: int, name: str) -> tuple[Arrays, dict[str, str], bool]:
    model = a_model(name)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    model = tensor_parallel(model, mesh_of())
    assert tied is (model.lm_head.weight is model.model.embed_tokens.weight)
    found = found_by(model)
    found["norm"] = clip_gradients(model.parameters(), 1e9)[None].numpy()
    return found, placements(model), tied


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qwen3", 2), ("qwen3, tied", 2), ("llama, biases", 2), ("qwen3, 4 heads for keys", 4), ("gemma2, capped", 2)],
)
def test_weights_on_several_ranks_give_what_one_process_does(rank_pool: RankPool, name: str, ranks: int) -> None:
    """Over several passes, whose gradients add up."""
    model = a_model(name)
    wanted = found_by(model)
    wanted["norm"] = clip_gradients(model.parameters(), 1e9)[None].numpy()
    for found, cut, tied in rank_pool.run(ranks, of_rank, name):
        assert largest_error(found, wanted) <= 1e-5
        layer = "model.layers.1."
        assert cut[f"{layer}self_attn.q_proj.weight"] == cut[f"{layer}mlp.up_proj.weight"] == "0"
        assert cut[f"{layer}self_attn.o_proj.weight"] == cut[f"{layer}mlp.down_proj.weight"] == "1"
        assert cut["model.embed_tokens.weight" if tied else "lm_head.weight"] == "0"


def stepped(model: PreTrainedModel, most: float) -> Arrays:
    """The weights after two AdamW steps with a bound of the gradient, and the norms that it had."""
    every = [*model.parameters()]
    kinds = [[each for each in every if isinstance(each, DTensor) is cut] for cut in (False, True)]
    optimizer = torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=1e-3, fused=True)
    norms = []
    for _ in range(2):
        found_by(model)
        norms.append(clip_gradients(every, most))
        optimizer.step()
        optimizer.zero_grad()
    for parameter in every:
        parameter.grad = parameter.detach().clone()
    return gradients(model) | {"norms": torch.stack(norms).numpy()}


def stepped_by_rank(rank: int, name: str, most: float) -> Arrays:
    return stepped(tensor_parallel(a_model(name), mesh_of()), most)


@pytest.mark.parametrize("most", [1.0, 1e9], ids=["bounded", "free"])
def test_steps_and_norms_are_those_of_one_process(rank_pool: RankPool, most: float) -> None:
    wanted = stepped(a_model("qwen3, tied"), most)
    for found in rank_pool.run(2, stepped_by_rank, "qwen3, tied", most):
        assert largest_error({"norms": found["norms"]}, {"norms": wanted["norms"]}) <= 1e-5
        # AdamW divides a gradient by its own size, which makes much of a small one's error.
        assert largest_error(found, wanted) <= 1e-3


def on_meta_of_rank(rank: int) -> dict[str, Any]:
    with torch.device("meta"):
        model = tensor_parallel(a_model("qwen3, tied"), mesh_of())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return {name: tuple(each.to_local().shape) for name, each in model.named_parameters() if isinstance(each, DTensor)}


def test_a_model_on_meta_is_cut_before_it_has_weights(rank_pool: RankPool) -> None:
    every = rank_pool.run(2, on_meta_of_rank)
    assert all(shapes["model.embed_tokens.weight"] == (30, 32) for shapes in every)
    assert all(shapes["model.layers.0.self_attn.o_proj.weight"] == (32, 16) for shapes in every)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    for name, ranks, why in (
        ("qwen3", 4, "num_key_value_heads of this qwen3 model is 2"),
        ("qwen3", 3, "num_attention_heads of this qwen3 model is 4"),
        ("gpt-oss, sinks", 2, "no plan to cut layers of gpt_oss models"),
    ):
        with pytest.raises(UsageError, match=why):
            tensor_plan(a_model(name), ranks)
    with pytest.raises(UsageError, match="no plan to cut layers of gpt2 models"):
        tensor_plan(a_model_of_another_kind("gpt2, learned positions"), 2)
    model = a_model("qwen3")
    model._tp_plan["model.layers.*.input_layernorm"] = "sequence_parallel"
    with pytest.raises(UsageError, match="qwen3 models are cut in ways that cannot be trained: sequence_parallel"):
        tensor_plan(model, 2)


def adapted(model: PreTrainedModel, targets: list[str] | str = "all-linear") -> PreTrainedModel:
    """With adapters whose B is not 0."""
    Adapters(model, LoraSettings(rank=3, targets=targets), 5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.linspace(-0.02, 0.03, weight.numel()).view_as(weight))
    return model


def adapters_of_rank(rank: int, name: str) -> Arrays:
    model = tensor_parallel(adapted(a_model(name)), mesh_of())
    cut = placements(model)
    layer = "model.layers.1.self_attn."
    assert cut[f"{layer}q_proj.lora_B.default.weight"] == "0" and cut[f"{layer}o_proj.lora_A.default.weight"] == "1"
    assert f"{layer}q_proj.lora_A.default.weight" not in cut and f"{layer}o_proj.lora_B.default.weight" not in cut
    return found_by(model)


def test_adapters_are_cut_as_their_layers(rank_pool: RankPool) -> None:
    wanted = found_by(adapted(a_model("qwen3")))
    assert wanted["model.layers.0.mlp.down_proj.lora_A.default.weight"].any()
    assert not wanted["model.layers.0.mlp.down_proj.base_layer.weight"].any(), "frozen"
    assert all(largest_error(found, wanted) <= 1e-5 for found in rank_pool.run(2, adapters_of_rank, "qwen3"))
    with pytest.raises(UsageError, match=r"adapters of model\.layers\.\*\.self_attn\.q_proj, in some layers only"):
        tensor_plan(adapted(a_model("qwen3"), ["model.layers.0.self_attn.q_proj"]), 2)


def both_of_rank(rank: int, name: str) -> Arrays:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    model = tensor_parallel(a_model(name), mesh["tensor"])
    return summed(found_by(model, mesh["context"]), mesh["context"])


@pytest.mark.parametrize("name", ["qwen3", "qwen3, tied"])
def test_tokens_and_weights_both_on_two_ranks(rank_pool: RankPool, name: str) -> None:
    wanted = found_by(a_model(name))
    assert all(largest_error(found, wanted) <= 1e-5 for found in rank_pool.run(4, both_of_rank, name))


def test_plain_gradients_are_bounded_as_torch_does() -> None:
    model = a_model("qwen3")
    found_by(model)
    other = copy.deepcopy(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()
    norm, wanted = clip_gradients(model.parameters(), 0.5), torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    assert torch.equal(norm, wanted)
    assert all(
        torch.equal(mine.grad, theirs.grad)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
        if mine.grad is not None
    )
