"""Rows whose tokens are on several ranks give the logprobs and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from services.wire.errors import UsageError
from tests.support.parallel_models import Arrays, a_model, found_by, gradients, largest_error, micro_batches, summed
from tests.support.rank_pool import RankPool
from tests.unit.trainer.test_trainer_packed_forward import a_model as a_model_of_another_kind
from trainer.model.critic import ValueModel
from trainer.model.forward import PackedForward
from trainer.model.logprobs import sampled_terms
from trainer.model.routers import RouterLoss
from trainer.parallel.ulysses import slice_of


def of_rank(rank: int, name: str, shares: bool, recomputes: bool = False) -> Arrays:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    model = a_model(name)
    if recomputes:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return summed(found_by(model, mesh["context"], shares=shares), mesh)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("qwen3, tied", True),
        ("llama, 12 heads of 6", True),
        ("mistral, a window", True),
        ("gpt-oss, sinks", True),
    ],
)
def test_tokens_on_several_ranks_give_what_one_process_does(
    rank_pool: RankPool, name: str, shares: bool, ranks: int
) -> None:
    """Also where ranks have no sampled token, or none at all, and keys are needed by several."""
    wanted = found_by(a_model(name), shares=shares)
    every = rank_pool.run(ranks, of_rank, name, shares)
    assert [largest_error(found, wanted) <= 1e-5 for found in every] == [True] * ranks
    assert all((found["logprobs"] == every[0]["logprobs"]).all() for found in every), "all ranks go on with the same"


def test_layers_may_be_computed_again_for_the_gradient(rank_pool: RankPool) -> None:
    wanted = found_by(a_model("qwen3"))
    assert all(largest_error(found, wanted) <= 1e-5 for found in rank_pool.run(2, of_rank, "qwen3", True, True))


def values_of_rank(rank: int, ranks: int) -> Arrays:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",)) if ranks > 1 else None
    critic = ValueModel(a_model("qwen3"), context=mesh)
    with torch.no_grad():
        critic.head.weight.fill_(0.3)
    values = critic(micro_batches()[0])
    (values * torch.linspace(-1.0, 2.0, len(values))).sum().backward()
    found = gradients(critic) | {"logprobs": values.detach().numpy()}
    return found if mesh is None else summed(found, mesh)


def test_a_critic_s_values_are_those_of_one_process(rank_pool: RankPool) -> None:
    (wanted,) = rank_pool.run(1, values_of_rank, 1)
    assert all(largest_error(found, wanted) <= 1e-5 for found in rank_pool.run(2, values_of_rank, 2))


def balanced_by_rank(rank: int, ranks: int) -> Arrays:
    """What the routers' loss, which is of all tokens at once, leaves in the gradients."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",)) if ranks > 1 else None
    model = a_model("qwen3, experts")
    policy, router = PackedForward(model, context=mesh), RouterLoss(model)
    losses = []
    for micro in micro_batches():
        with router.recording():
            sampled_terms(policy, micro)
        losses.append(router.value(policy.part_of(micro.row)))
    torch.stack(losses).sum().backward()
    found = gradients(model) | {"logprobs": torch.stack(losses).detach().numpy()}
    return found if mesh is None else summed(found, mesh)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_are_balanced_over_the_tokens_of_all_ranks(rank_pool: RankPool, ranks: int) -> None:
    (wanted,) = rank_pool.run(1, balanced_by_rank, 1)
    assert wanted["model.layers.0.mlp.gate.weight"].any()
    assert all(largest_error(found, wanted) <= 1e-5 for found in rank_pool.run(ranks, balanced_by_rank, ranks))


def see_neighbour(_: torch.nn.Module, __: Any, keywords: dict[str, Any], output: Any) -> Any:
    """A token's state depends on the one before it in its row, without any attention."""
    states = output.last_hidden_state
    positions = keywords.get("position_ids", torch.arange(states.shape[1])[None])
    output.last_hidden_state = states + 0.1 * states.roll(1, 1) * (positions > 0)[..., None]
    return output


def refused_by_rank(rank: int, name: str) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    if name == "sees its neighbour":
        model = a_model("qwen3")
        model.base_model.register_forward_hook(see_neighbour, with_kwargs=True)
        assert PackedForward(model).separation == "within"
    else:
        model = a_model_of_another_kind(name)
    with pytest.raises(UsageError) as refused:
        PackedForward(model, context=mesh)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2, capped scores", "attention of gemma2 models cannot be shared by heads"),
        ("mamba, a recurrence", "attention of mamba models cannot be shared by heads"),
        ("sees its neighbour", "tokens of qwen3 models see others by more than attention"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused_by_name(rank_pool: RankPool, name: str, why: str) -> None:
    assert all(why in told for told in rank_pool.run(2, refused_by_rank, name))


def heads_of_rank(rank: int) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    part = slice_of(mesh, 7)
    assert part.sizes == (3, 2, 2) and (part.begin, part.end) == ((0, 3), (3, 5), (5, 7))[rank]
    with pytest.raises(UsageError) as refused:
        part.to_heads(*(torch.zeros(2, heads, 8) for heads in (4, 2, 2)))
    return str(refused.value)


def test_heads_that_do_not_divide_are_refused(rank_pool: RankPool) -> None:
    assert all("4 attention heads cannot be divided among 3" in told for told in rank_pool.run(3, heads_of_rank))
