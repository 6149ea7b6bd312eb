"""Precision: passes in bfloat16 over float32 weights, and what is refused without a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from tests.support.trajectories import grouped, random_trajectories
from trainer.data.packing import PackedBatch, pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.model.precision import compute_dtype, use_tf32
from trainer.sft.tiny_model import build_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base() -> Qwen3ForCausalLM:
    """With weights as large as trained ones are, so that tokens matter to each other."""
    model = build_model(seed=5, hidden_size=64, layers=4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0 if weight.ndim > 1 else 1.0)
    return model


def a_batch() -> PackedBatch:
    rows, tally = rows_of(grouped(random_trajectories(3, groups=4, size=6)), 0, 9)
    return pack(rows, tally, 4096)


def gradient(learner: Learner) -> torch.Tensor:
    """Of all weights, float32, one after the other."""
    batch = a_batch()
    learner.gradient(batch, learner.proximals([batch])[0])
    return torch.cat(
        [weight.grad.float().flatten() for weight in learner.model.parameters() if weight.grad is not None]
    )


def test_gradients_in_bfloat16_are_as_near_as_those_of_a_model_in_bfloat16(base: Qwen3ForCausalLM) -> None:
    settings = TrainerSettings(clip_grad_norm=1e9)
    wanted = gradient(Learner(copy.deepcopy(base), settings))
    ours = Learner(copy.deepcopy(base), settings.model_copy(update={"dtype": "bfloat16"}))
    plain = Learner(copy.deepcopy(base).to(torch.bfloat16), settings)
    errors = [float((gradient(learner) - wanted).norm() / wanted.norm()) for learner in (ours, plain)]
    assert 1e-4 < errors[0] <= 2 * errors[1]


def test_weights_gradients_and_moments_stay_float32(base: Qwen3ForCausalLM) -> None:
    learner = Learner(copy.deepcopy(base), TrainerSettings(dtype="bfloat16", warmup_steps=0))
    assert learner.separation == "within" and learner.stem_width == 64
    batch = a_batch()
    learner.gradient(batch, learner.proximals([batch])[0])
    assert {weight.grad.dtype for weight in learner.model.parameters() if weight.grad is not None} == {torch.float32}
    learner.apply()
    assert {weight.dtype for weight in learner.weights().values()} == {torch.float32}
    moments = [state for each in learner.optimizer.state.values() for state in each.values()]
    assert {state.dtype for state in moments} == {torch.float32}


def test_a_small_step_is_not_lost_as_it_would_be_in_bfloat16(base: Qwen3ForCausalLM) -> None:
    learner = Learner(copy.deepcopy(base), TrainerSettings(dtype="bfloat16", warmup_steps=0, learning_rate=1e-6))
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    learner.step(a_batch())
    moved = [name for name, weight in learner.weights().items() if not torch.equal(weight, before[name])]
    assert {name for name in before if "layers" in name} <= {*moved}


def test_each_device_has_its_precision() -> None:
    assert compute_dtype("auto", CPU) == compute_dtype("float32", CPU) == torch.float32
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16


def test_tf32_is_refused_without_a_gpu() -> None:
    with pytest.raises(UsageError, match="tf32 without a GPU has no effect"):
        use_tf32(True, CPU)
    use_tf32(False, CPU)
