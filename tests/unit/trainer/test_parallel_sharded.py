"""Tensor and expert ranks within data ranks: FSDP2 takes what they have cut, and the gradients are those of one process."""

from __future__ import annotations

from types import MethodType

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.support.parallel_models import Arrays, a_model, gradients, largest_error, loss_of, micro_batches
from tests.support.rank_pool import RankPool
from trainer.model.forward import PackedForward
from trainer.parallel.expert import expert_parallel, expert_plan
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.tensor import tensor_parallel

PASSES = (0, 1), (1, 2)


def of_rank(rank: int, name: str) -> Arrays:
    """Two data ranks, with two passes each, of two tensor ranks; experts on the data ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, plan = a_model(name), dict[str, str]()
    if "experts" in name:
        model, plan = expert_parallel(model, mesh["data"]), expert_plan(model, 2)
    tensor_parallel(model, mesh["tensor"], plan)
    policy = PackedForward(model)
    # They are where they are.
    experts = {each for part, each in model.named_parameters() if ".experts." in part}
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh["data"], ignored_params=experts)
    fully_shard(model, mesh=mesh["data"], ignored_params=experts)
    model.inside = MethodType(lambda _, work: work(), model)
    register_fsdp_forward_method(model, "inside")
    micros = micro_batches()
    for number in PASSES[mesh["data"].get_local_rank()]:
        loss, _ = model.inside(lambda micro=micros[number]: list(loss_of(policy, micro)))
        # FSDP2 takes the mean over ranks.
        (2.0 * loss).backward()
    for each in experts:
        assert each.grad is not None
        each.grad.div_(2.0)
    norm = clip_gradients(model.parameters(), 1e9)
    return gradients(model) | {"norm": norm[None].numpy()}


@pytest.mark.parametrize("name", ["qwen3, tied", "qwen3, experts"])
def test_weights_cut_by_layers_and_by_ranks(rank_pool: RankPool, name: str) -> None:
    model = a_model(name)
    policy = PackedForward(model)
    for number in (number for passes in PASSES for number in passes):
        loss_of(policy, micro_batches()[number])[0].backward()
    wanted = gradients(model) | {"norm": clip_gradients(model.parameters(), 1e9)[None].numpy()}
    for found in rank_pool.run(4, of_rank, name):
        assert largest_error(found, wanted) <= 1e-5
