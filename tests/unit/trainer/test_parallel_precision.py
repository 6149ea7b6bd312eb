"""Passes in bfloat16 on several ranks are as near to float32 as those of one process."""

from __future__ import annotations

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh

from tests.support.parallel_models import Arrays, a_model, found_by, summed
from tests.support.rank_pool import RankPool
from trainer.parallel.expert import expert_parallel, expert_plan
from trainer.parallel.tensor import tensor_parallel


def of_rank(rank: int, name: str, way: str) -> Arrays:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(way,))
    model, plan = a_model(name), dict[str, str]()
    if way == "context":
        return summed(found_by(model, mesh, precision="bfloat16"), mesh)
    if way == "expert":
        model, plan = expert_parallel(model, mesh, mesh), expert_plan(model, 2)
    return found_by(tensor_parallel(model, mesh, plan), precision="bfloat16")


def error(found: Arrays, wanted: Arrays) -> float:
    """Root mean square over tensors of their distances, of each one's size."""
    distances = [
        np.linalg.norm(found[name] - array) / np.linalg.norm(array) for name, array in wanted.items() if array.any()
    ]
    return float(np.sqrt(np.mean(np.square(distances))))


@pytest.mark.parametrize(
    ("name", "way"), [("qwen3", "context"), ("qwen3, tied", "tensor"), ("qwen3, experts", "expert")]
)
def test_the_error_of_16_bits_is_not_twice_that_of_one_process(rank_pool: RankPool, name: str, way: str) -> None:
    exact, one = found_by(a_model(name)), found_by(a_model(name), precision="bfloat16")
    assert 0.0 < error(one, exact) < 0.5
    for found in rank_pool.run(2, of_rank, name, way):
        assert error(found, exact) <= 2.0 * error(one, exact)
