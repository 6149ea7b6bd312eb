"""The ranks that tests run functions in."""

from __future__ import annotations

import pytest

from tests.support.rank_pool import RankPool


def summed(rank: int, scale: float) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(total)
    return float(total)


def failing(rank: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("no such rows")
    dist.barrier()


def test_a_function_runs_on_every_rank_and_one_that_fails_is_named(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, summed, 2.0) == [6.0, 6.0]
    with pytest.raises(RuntimeError, match=r"rank 1 of 2: (?s:.*)no such rows"):
        rank_pool.run(2, failing)
    assert rank_pool.run(1, summed, 1.0) == [1.0]
