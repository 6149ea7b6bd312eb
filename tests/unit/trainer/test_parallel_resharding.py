"""Layers stay collected from the forward to the backward pass, or not: how often they are collected, and what is left."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from services.policies.training.layout import Layout
from tests.support.parallel_models import a_model, loss_of, micro_batches
from tests.support.rank_pool import RankPool
from tests.support.trained_by_ranks import train
from trainer.model.forward import PackedForward
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import cut, shard

_FORWARD, _BACKWARD, _COLLECTED = "FSDP::pre_forward", "FSDP::pre_backward", "FSDP::all_gather"


def collected(rank: int, reshard: bool | str, option: str) -> tuple[Counter[str], dict[str, Any]]:
    """How often layers entered a pass, and were collected, in two steps; and what the weights of rank 0 are then."""
    trainer: dict[str, Any] = {"micro_batch_tokens": 120, "parallel": {"reshard_after_forward": reshard}}
    if option == "critic, full checkpointing":
        trainer |= {"advantage": {"estimator": "gae"}, "activation_checkpointing": "full"}
    if option == "adapters":
        trainer |= {"lora": {"rank": 4}, "loss": {"kl": 0.1}}
    experts = option == "experts"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        steps = train(
            rank,
            {"data": 2, "expert": 2 if experts else 1},
            {"k": 3, "trainer": trainer},
            steps=2,
            family="Qwen3-MoE" if experts else None,
        )
    counts = Counter[str]()
    for event in seen.key_averages():
        kind, _, name = event.key.partition(" (")
        # One rank has each expert: there is nothing to collect.
        if "layers." in name and ".experts" not in name:
            counts[kind] += event.count
    return counts, {} if steps is None else steps.weights


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "critic, full checkpointing", "adapters", "experts"])
def test_layers_that_stay_are_collected_once_a_pass(rank_pool: RankPool, option: str) -> None:
    twice, once, chosen = (rank_pool.run(2, collected, reshard, option) for reshard in (True, False, "auto"))
    for (of_twice, wanted), (of_once, found) in zip(twice, once, strict=True):
        assert of_twice[_FORWARD] == of_once[_FORWARD] and of_twice[_BACKWARD] == of_once[_BACKWARD] > 0
        assert of_twice[_COLLECTED] == of_twice[_FORWARD] + of_twice[_BACKWARD]
        assert of_once[_COLLECTED] == of_once[_FORWARD]
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
    # Of a model as small as these, nothing speaks against it.
    assert chosen[0][0][_COLLECTED] == once[0][0][_COLLECTED]


def left_collected(rank: int) -> list[bool]:
    """Whether weights are collected: before any pass, after one without gradients, after one with, and when it has gone
    back."""
    model, ranks = a_model("qwen3, tied"), Ranks.of_group(Layout(data=2))
    cut(model, ranks)
    shard(model, ranks, reshard=False)
    policy, micro = PackedForward(model), micro_batches()[rank]
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def are() -> bool:
        found = {isinstance(weight, DTensor) for layer in layers for weight in layer.parameters()}
        assert len(found) == 1, "some are, some are not"
        # What is of no layer is as they are.
        assert isinstance(model.get_input_embeddings().weight, DTensor) in found
        return not found.pop()

    states = [are()]
    with torch.no_grad():
        loss_of(policy, micro)
    states.append(are())
    loss, _ = loss_of(policy, micro)
    states.append(are())
    loss.backward()
    return [*states, are()]


def test_a_pass_without_a_backward_pass_leaves_nothing(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, left_collected) == [[False, False, True, False]] * 2
