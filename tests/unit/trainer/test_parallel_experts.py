"""Experts on several ranks give the logprobs and gradients of one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from services.wire.errors import UsageError
from tests.support.parallel_models import Arrays, a_model, found_by, largest_error, summed
from tests.support.rank_pool import RankPool
from trainer.parallel.expert import expert_parallel, expert_plan
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.tensor import tensor_parallel


def check_cut(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    experts = {name: each for name, each in model.named_parameters() if ".experts." in name}
    assert experts
    for name, each in experts.items():
        assert isinstance(each, DTensor) and each.placements == (Shard(0),), name
        local = each.to_local()
        assert local.shape[0] == 4 // mesh.size() and local.untyped_storage().nbytes() == local.numel() * 4


def without_logprobs(found: Arrays) -> Arrays:
    return {name: array for name, array in found.items() if name != "logprobs"}


def on_data_ranks(rank: int, name: str) -> tuple[Arrays, float]:
    """Each rank has two of the four passes; gradients of all but experts are summed."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    model = expert_parallel(a_model(name), mesh)
    check_cut(model, mesh)
    found = found_by(model, passes=[(0, 1), (1, 2)][rank])
    every = {name: array for name, array in found.items() if ".experts." not in name}
    found |= summed(every, mesh)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad, group=mesh.get_group())
    return without_logprobs(found), float(clip_gradients(model.parameters(), 1.0))


@pytest.mark.parametrize("name", ["qwen3, experts", "mixtral"])
def test_experts_of_ranks_with_tokens_of_their_own(rank_pool: RankPool, name: str) -> None:
    model = a_model(name)
    wanted = without_logprobs(found_by(model, passes=(0, 1, 1, 2)))
    norm = float(clip_gradients(model.parameters(), 1.0))
    for found, of_ranks in rank_pool.run(2, on_data_ranks, name):
        assert largest_error(found, wanted) <= 1e-5
        assert of_ranks == pytest.approx(norm, rel=1e-5)


def on_tensor_ranks(rank: int, name: str, cuts_all: bool, recomputes: bool = False) -> Arrays:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    model = expert_parallel(a_model(name), mesh, mesh)
    if recomputes:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if cuts_all:
        model = tensor_parallel(model, mesh, expert_plan(model, mesh.size()))
    check_cut(model, mesh)
    return found_by(model)


def on_context_ranks(rank: int, name: str) -> Arrays:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    found = found_by(expert_parallel(a_model(name), mesh), mesh)
    return found | summed({name: array for name, array in found.items() if ".experts." not in name}, mesh)


def by_features(rank: int, name: str) -> Arrays:
    """No experts of their own: each is cut as the other weights are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    return found_by(tensor_parallel(a_model(name), mesh))


@pytest.mark.parametrize("name", ["qwen3, experts", "mixtral"])
def test_experts_of_ranks_with_the_same_tokens(rank_pool: RankPool, name: str) -> None:
    wanted = found_by(a_model(name))
    for way in ((on_tensor_ranks, name, True), (by_features, name)):
        for found in rank_pool.run(2, *way):
            assert largest_error(found, wanted) <= 1e-5, way


def test_layers_may_be_computed_again_for_the_gradient(rank_pool: RankPool) -> None:
    wanted = found_by(a_model("qwen3, experts"))
    for found in rank_pool.run(2, on_tensor_ranks, "qwen3, experts", True, True):
        assert largest_error(found, wanted) <= 1e-5


def test_experts_of_ranks_with_parts_of_a_row(rank_pool: RankPool) -> None:
    wanted = found_by(a_model("qwen3, experts"))
    for found in rank_pool.run(2, on_context_ranks, "qwen3, experts"):
        assert largest_error(found, wanted) <= 1e-5


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no plan for qwen3 models to send tokens"):
        expert_plan(a_model("qwen3"), 2)
    with pytest.raises(UsageError, match=r"holds 4 experts, which does not divide"):
        expert_plan(a_model("mixtral"), 3)
