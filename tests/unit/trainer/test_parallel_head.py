"""A head whose vocabulary is on several ranks says what the whole one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.parallel_models import Arrays, largest_error
from tests.support.rank_pool import RankPool
from tests.unit.trainer.test_trainer_head import VOCABULARY, inputs, some_kept
from trainer.model.head import Terms, head_terms
from trainer.parallel.vocabulary import local_rows


def arrays(terms: Terms, gradients: dict[str, Any]) -> Arrays:
    found = {"logprobs": terms.logprobs, "entropy": terms.entropy, "top": terms.top_logprobs, "ids": terms.top_ids}
    every = {name: tensor for name, tensor in {**found, **gradients}.items() if tensor is not None}
    return {name: tensor.detach().numpy() for name, tensor in every.items()}


def loss_of(terms: Terms) -> torch.Tensor:
    """That no two tokens have the same part in."""
    loss = (terms.logprobs * torch.linspace(-1.0, 2.0, len(terms.logprobs), dtype=torch.float64)).sum()
    if terms.entropy is not None:
        loss = loss + (terms.entropy * torch.linspace(0.1, 0.5, len(terms.entropy), dtype=torch.float64)).sum()
    if terms.top_logprobs is not None:
        loss = loss + 0.1 * terms.top_logprobs.cos().sum()
    return loss


def whole(chunk: int, top: int, entropy: bool, warm: bool) -> Arrays:
    hidden, weight, bias, tokens, temperature = inputs()
    terms = head_terms(
        hidden,
        weight,
        tokens,
        temperature if warm else None,
        kept=some_kept(tokens) if warm and not top else None,
        bias=bias,
        entropy=entropy,
        top=top,
        chunk=chunk,
    )
    loss_of(terms).backward()
    return arrays(terms, {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad})


def of_rank(rank: int, cases: list[tuple[int, int, bool, bool]]) -> list[Arrays]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    found = []
    for chunk, top, entropy, warm in cases:
        hidden, weight, bias, tokens, temperature = inputs()
        cut, cut_bias = (
            distribute_tensor(each.detach(), mesh, [Shard(0)]).requires_grad_(True) for each in (weight, bias)
        )
        (rows, shard), (of_bias, _) = local_rows(cut), local_rows(cut_bias)
        assert shard is not None and shard.most == -(-VOCABULARY // mesh.size())
        terms = head_terms(
            hidden,
            rows,
            tokens,
            temperature if warm else None,
            kept=some_kept(tokens) if warm and not top else None,
            bias=of_bias,
            entropy=entropy,
            top=top,
            chunk=chunk,
            shard=shard,
        )
        loss_of(terms).backward()
        assert isinstance(cut.grad, DTensor) and isinstance(cut_bias.grad, DTensor)
        gradients = {"hidden": hidden.grad, "weight": cut.grad.full_tensor(), "bias": cut_bias.grad.full_tensor()}
        found.append(arrays(terms, gradients))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients_are_those_of_the_whole_head(rank_pool: RankPool, ranks: int) -> None:
    """11 tokens: parts of 6 and 5; of 3, 3, 3 and 2, fewer than the likeliest that are asked for."""
    cases = [
        (chunk, top, entropy, warm)
        for chunk in (2 * VOCABULARY, 1000)
        for top in (0, 4)
        for entropy in (False, True)
        for warm in (False, True)
    ]
    every = rank_pool.run(ranks, of_rank, cases)
    for number, case in enumerate(cases):
        wanted = whole(*case)
        for found in every:
            assert ("ids" in wanted) is ("ids" in found[number])
            assert np.array_equal(wanted.get("ids", 0), found[number].get("ids", 0))
            assert largest_error(found[number], wanted) <= 1e-10, case


def rows_of_rank(rank: int) -> list[int]:
    """Of a weight of 5 rows on 4 ranks: 2, 2, 1 and none."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    weight = torch.arange(10.0).view(5, 2)
    cut = distribute_tensor(weight, mesh, [Shard(0)])
    rows, shard = local_rows(cut)
    assert shard is not None and torch.equal(rows, weight[shard.start : shard.start + shard.size])
    logits = torch.tensor([[3.0, 1.0, 4.0, 1.5, 9.0], [2.0, 7.0, 1.0, 8.0, 2.5]])
    values, ids = shard.likeliest(logits[:, shard.start : shard.start + shard.size], 3)
    assert values.tolist() == [[9.0, 4.0, 3.0], [8.0, 7.0, 2.5]] and ids.tolist() == [[4, 2, 0], [3, 1, 4]]
    terms = head_terms(torch.ones(2, 2), rows, torch.tensor([0, 4]), shard=shard, entropy=True)
    assert torch.equal(terms.logprobs, torch.log_softmax(weight.sum(1), 0)[[0, 4]])
    assert local_rows(distribute_tensor(weight, mesh, [Replicate()]))[1] is None
    with pytest.raises(ValueError, match="by rows"):
        local_rows(distribute_tensor(weight, mesh, [Shard(1)]))
    return [shard.start, shard.size]


def test_a_rank_may_have_fewer_rows_or_none(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, rows_of_rank) == [[0, 2], [2, 2], [4, 1], [5, 0]]
