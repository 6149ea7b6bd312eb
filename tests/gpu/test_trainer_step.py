"""The trainer's step on a GPU: kernels that are reached, gradients in bfloat16, memory of activations, equal bytes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from services.config.settings import TrainerSettings
from services.config.training.lora import LoraSettings
from services.config.training.optimizer import OptimizerSettings
from tests.support.trajectories import grouped, random_trajectories
from trainer.checkpoint.environment import repeat_exactly
from trainer.data.packing import PackedBatch, pack
from trainer.data.rows import rows_of
from trainer.model import packed_attention
from trainer.model.adapters import Adapters
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture
def repeated() -> Iterator[None]:
    """Kernels that give the same bytes each time; else gradients of attention and of embeddings are summed as they come."""
    repeat_exactly()
    yield
    torch.use_deterministic_algorithms(False)


def allocated() -> int:
    """Bytes of tensors on the device; those of earlier tests are gone."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def a_learner(layers: int = 2, hidden_size: int = 128, **settings: Any) -> Learner:
    model = build_model(seed=5, hidden_size=hidden_size, layers=layers).to("cuda")
    chosen = TrainerSettings(clip_grad_norm=1e9, warmup_steps=0, **settings)
    return Learner(model, chosen, adapters=Adapters(model, chosen.lora, 1) if chosen.lora.rank else None)


def a_batch(learner: Learner, groups: int = 8, seed: int = 3) -> PackedBatch:
    rows, tally = rows_of(grouped(random_trajectories(seed, groups=groups, size=6)), 0, 9)
    return pack(rows, tally, 8192, learner.model.device, learner.stem_width)


def gradient(learner: Learner) -> torch.Tensor:
    batch = a_batch(learner)
    learner.gradient(batch, learner.proximals([batch])[0])
    found = torch.cat(
        [weight.grad.float().flatten() for weight in learner.model.parameters() if weight.grad is not None]
    )
    learner.forget_gradient()
    return found


def test_a_gpu_that_has_bfloat16_computes_in_it_with_the_kernel_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    whole: Callable[..., Any] = varlen.varlen_attn

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return whole(*arguments, **named)

    learner = a_learner()
    assert learner.separation == "within" and learner.stem_width == 128
    monkeypatch.setattr(packed_attention, "varlen_attn", counted)
    gradient(learner)
    assert calls == 2, "once a layer"


def test_gradients_in_bfloat16_are_as_near_as_those_of_a_model_in_bfloat16() -> None:
    wanted = gradient(a_learner(dtype="float32"))
    ours, plain = a_learner(dtype="bfloat16"), a_learner(dtype="float32")
    plain = Learner(plain.model.to(torch.bfloat16), plain.settings)
    errors = [float((gradient(each) - wanted).norm() / wanted.norm()) for each in (ours, plain)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.usefixtures("repeated")
@pytest.mark.parametrize("offload", [False, True])
def test_checkpointed_layers_take_less_memory_and_give_the_same_gradients(offload: bool) -> None:
    found = {}
    for which in ("none", "full"):
        learner = a_learner(8, 256, activation_checkpointing=which, activation_offload=offload and which == "full")
        batch = a_batch(learner, groups=128)
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        learner.gradient(batch, learner.proximals([batch])[0])
        peak = torch.cuda.max_memory_allocated() - before
        found[which] = peak, [weight.grad.clone() for weight in learner.model.parameters() if weight.grad is not None]
    assert found["full"][0] < found["none"][0] / 2
    for kept, again in zip(found["none"][1], found["full"][1], strict=True):
        torch.testing.assert_close(again, kept, rtol=1e-2, atol=1e-3 * float(kept.abs().max()))


@pytest.mark.usefixtures("repeated")
def test_optimizer_state_in_host_memory_gives_the_same_bytes() -> None:
    ends, held = [], []
    for offload in (False, True):
        learner = a_learner(4, 256, optimizer=OptimizerSettings(offload=offload))
        before = allocated()
        for _ in range(2):
            learner.step(a_batch(learner))
        held.append(allocated() - before)
        ends.append(learner)
    plain, offloaded = ends
    for name, weight in plain.weights().items():
        assert torch.equal(offloaded.weights()[name], weight), name
    state = [tensor for each in offloaded.optimizer.state.values() for tensor in each.values()]
    assert state and all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in state)
    assert held[1] < held[0] / 10


@pytest.mark.parametrize("offload", [False, True])
def test_moments_in_8_bits_take_a_quarter_of_the_memory_and_train_alike(offload: bool) -> None:
    held, ends = [], []
    for bits in (32, 8):
        chosen = OptimizerSettings.model_validate(
            {"state_bits": bits, "offload": offload and bits == 8, "epsilon": 1e-6}
        )
        learner = a_learner(4, 256, optimizer=chosen)
        first = {name: weight.clone() for name, weight in learner.weights().items()}
        before = allocated()
        for seed in range(4):
            learner.step(a_batch(learner, seed=seed))
        held.append(allocated() - before)
        ends.append(torch.cat([(weight - first[name]).flatten() for name, weight in learner.weights().items()]))
    assert held[1] < held[0] / (10 if offload else 3)
    assert float((ends[1] - ends[0]).norm() / ends[0].norm()) < 0.1


def test_adapters_on_a_gpu_are_published_merged() -> None:
    learner = a_learner(lora=LoraSettings(rank=4), learning_rate=1e-2)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    learner.step(a_batch(learner))
    moved = {name for name, weight in learner.weights().items() if not torch.equal(weight, before[name])}
    assert moved and all("proj" in name for name in moved)


@pytest.mark.usefixtures("repeated")
def test_deterministic_kernels_repeat_a_step_byte_for_byte() -> None:
    first = a_learner()
    second = Learner(copy.deepcopy(first.model), first.settings)
    for learner in (first, second):
        for _ in range(3):
            learner.step(a_batch(learner))
    for name, weight in first.weights().items():
        assert torch.equal(weight, second.weights()[name]), name
