"""What of each model family can be on two ranks: that gives what one process does, and all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from services.wire.errors import UsageError
from tests.support.model_families import FAMILIES, make_family
from tests.support.parallel_models import Arrays, found_by, largest_error, summed
from tests.support.rank_pool import RankPool
from trainer.model.forward import freeze_beside_text
from trainer.parallel.expert import expert_parallel, expert_plan
from trainer.parallel.tensor import tensor_parallel

TENSOR, CONTEXT, EXPERT = "tensor", "context", "expert"
WAYS = {
    "Qwen3": {TENSOR, CONTEXT},
    "Qwen2.5": {TENSOR, CONTEXT},
    "Llama": {TENSOR, CONTEXT},
    "Mistral": {TENSOR, CONTEXT},
    "Gemma 2": {TENSOR},
    "Gemma 3, text": {TENSOR, CONTEXT},
    "Gemma 3": {TENSOR, CONTEXT},
    "Qwen3-MoE": {TENSOR, CONTEXT, EXPERT},
    "Qwen2-MoE": {TENSOR, EXPERT},
    "Mixtral": {TENSOR, CONTEXT, EXPERT},
    "Phi-3.5-MoE": {EXPERT},
    "gpt-oss": {CONTEXT, EXPERT},
    "Llama 4, text": set(),
    "Qwen3-Next": {TENSOR, EXPERT},
}


def a_model(family: str) -> PreTrainedModel:
    """With weights large enough for tokens to matter to each other."""
    model = make_family(family).eval()
    freeze_beside_text(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    return model


def on_tensor_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> Arrays:
    return found_by(tensor_parallel(model, mesh))


def on_context_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> Arrays:
    return summed(found_by(model, mesh), mesh)


def on_expert_ranks(model: PreTrainedModel, mesh: DeviceMesh) -> Arrays:
    """All else is cut too, where it can be."""
    expert_parallel(model, mesh, mesh)
    with suppress(UsageError):
        tensor_parallel(model, mesh, expert_plan(model, mesh.size()))
    return found_by(model)


RUNS: dict[str, Callable[[PreTrainedModel, DeviceMesh], Arrays]] = {
    TENSOR: on_tensor_ranks,
    CONTEXT: on_context_ranks,
    EXPERT: on_expert_ranks,
}


def of_rank(rank: int, family: str, wanted: Arrays) -> dict[str, float]:
    """The largest error of each way that is taken."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    found = {}
    for way, run in RUNS.items():
        try:
            found[way] = largest_error(run(a_model(family), mesh), wanted)
        except UsageError as refused:
            assert f"trainer.parallel.{way}=2" in str(refused)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_taken_gives_what_one_process_does(rank_pool: RankPool, family: str) -> None:
    wanted = found_by(a_model(family))
    for errors in rank_pool.run(2, of_rank, family, wanted):
        assert set(errors) == WAYS[family]
        assert max(errors.values(), default=0.0) <= 1e-5
