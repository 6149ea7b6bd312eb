"""One optimizer step: whatever the split into micro-batches, it is that of the formula, and the same bytes each time."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.config.settings import TrainerSettings
from services.config.training.algorithm import CorrectionSettings, LossSettings
from services.wire.run_metrics import TokenStatistics
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Trajectory
from tests.support.trajectories import a_rollout, a_segment, group_of, grouped, random_trajectories
from trainer.algorithms.advantages.grpo import group_relative
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model


@pytest.fixture(scope="module")
def fresh_model() -> Qwen3ForCausalLM:
    return build_model(seed=5, hidden_size=32, layers=1)


def learn(
    model: Qwen3ForCausalLM, trajectories: list[Trajectory], settings: TrainerSettings, *, version: int = 0, k: int = 2
) -> tuple[Learner, TokenStatistics]:
    learner = Learner(copy.deepcopy(model), settings, version)
    rows, tally = rows_of(grouped(trajectories), version, k)
    return learner, learner.step(pack(rows, tally, settings.micro_batch_tokens))


def reference_gradients(
    model: Qwen3ForCausalLM,
    trajectories: list[Trajectory],
    *,
    version: int,
    k: int,
    low: float = 0.2,
    high: float = 0.2,
) -> dict[str, torch.Tensor]:
    """The formula in float64, one sequence and one token at a time, without padding, packing or skipping."""
    exact = copy.deepcopy(model).double()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in grouped(trajectories):
        advantages = group_relative(np.array([member.payload.reward for member in group.members])).tolist()
        for member, advantage in zip(group.members, advantages, strict=True):
            for segment in member.payload.segments:
                ids = torch.frombuffer(bytearray(segment.token_ids), dtype=torch.int32).long()
                behaviour = torch.frombuffer(bytearray(segment.logprobs), dtype=torch.float32).double()
                logits = exact(input_ids=ids[None]).logits[0] / member.payload.samplings[0].temperature
                for span in segment.version_spans:
                    if version - span.version > k:
                        continue
                    for place in range(span.start, span.start + span.length):
                        logprob = torch.log_softmax(logits[place - 1], -1)[ids[place]]
                        ratio = (logprob - behaviour[place]).exp()
                        clipped = ratio.clamp(1 - low, 1 + high)
                        total = total - torch.minimum(ratio * advantage, clipped * advantage)
                        tokens += 1
    (total / tokens).backward()
    return {name: parameter.grad for name, parameter in exact.named_parameters() if parameter.grad is not None}


def mixed_batch() -> list[Trajectory]:
    """Random groups, one with temperature 0.7, one without a signal, one of mixed versions with two segments."""
    batch = random_trajectories(1, groups=3, size=3, version=6)
    warm = SamplingParams(max_tokens=8, temperature=0.7)
    batch += [
        a_rollout(
            [a_segment([7, 8], [9, 3], [-4.0, -4.2], [5, 5])], float(i == 0), group="w", size=3, member=i, sampling=warm
        )
        for i in range(3)
    ]
    batch += [a_rollout([a_segment([4], [5], [-4.1], [6])], 1.0, group="same", size=2, member=i) for i in range(2)]
    two = [a_segment([2, 3], [4, 5, 6], [-4.0, -3.9, -4.3], [2, 4, 6]), a_segment([6], [7], [-4.2], [6])]
    batch += [a_rollout(two, float(i), group="two", size=2, member=i) for i in range(2)]
    return batch


def test_gradients_are_those_of_the_formula(fresh_model: Qwen3ForCausalLM) -> None:
    settings = TrainerSettings(micro_batch_tokens=30, clip_grad_norm=1e9, warmup_steps=0)
    expected = reference_gradients(fresh_model, mixed_batch(), version=6, k=2)
    learner, statistics = learn(fresh_model, mixed_batch(), settings, version=6)
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in expected.values()))
    assert statistics.grad_norm == pytest.approx(norm, rel=1e-4)
    moments = {name: learner.optimizer.state[p]["exp_avg"] for name, p in learner.model.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(moments[name].double() / (1 - 0.9), gradient, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize(
    "loss", [LossSettings(), LossSettings(anchor="proximal", correction=CorrectionSettings(weight="token"))]
)
def test_the_split_into_micro_batches_changes_nothing(fresh_model: Qwen3ForCausalLM, loss: LossSettings) -> None:
    whole, whole_statistics = learn(
        fresh_model, mixed_batch(), TrainerSettings(micro_batch_tokens=4096, loss=loss), version=6
    )
    split, split_statistics = learn(
        fresh_model, mixed_batch(), TrainerSettings(micro_batch_tokens=1, loss=loss), version=6
    )
    assert split_statistics.grad_norm == pytest.approx(whole_statistics.grad_norm, rel=1e-4)
    assert split_statistics.loss == pytest.approx(whole_statistics.loss, rel=1e-3, abs=1e-6)
    assert split_statistics.logprob_gap_max_all == pytest.approx(whole_statistics.logprob_gap_max_all or 0, rel=1e-4)
    for name, weight in whole.weights().items():
        torch.testing.assert_close(split.weights()[name], weight, rtol=0, atol=1e-5)


def test_two_learners_make_the_same_bytes(fresh_model: Qwen3ForCausalLM) -> None:
    first, _ = learn(fresh_model, mixed_batch(), TrainerSettings(), version=6)
    second, _ = learn(fresh_model, mixed_batch(), TrainerSettings(), version=6)
    assert all(torch.equal(weight, second.weights()[name]) for name, weight in first.weights().items())


def test_a_batch_without_a_signal_is_a_step_that_only_momentum_moves(fresh_model: Qwen3ForCausalLM) -> None:
    learner = Learner(copy.deepcopy(fresh_model), TrainerSettings())
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    flat = grouped([a_rollout([a_segment([4], [5], [-4.1], [0])], 1.0, size=2, member=i) for i in range(2)])
    rows, tally = rows_of(flat, 0, 2)
    statistics = learner.step(pack(rows, tally, 4096))
    assert learner.version == 1
    assert (statistics.grad_norm, statistics.logprob_gap_mean, statistics.clip_fraction) == (0.0, None, None)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())


def test_statistics_count_current_tokens_apart(fresh_model: Qwen3ForCausalLM) -> None:
    """One token of version 6 that stands after one of version 5: it is no current one, its engine state was a mixture."""
    mixed = a_segment([2, 3], [4, 5], [-4.0, -3.9], [5, 6])
    current = a_segment([2, 3], [4, 5], [-4.0, -3.9], [6, 6])
    trajectories = [a_rollout([segment], float(i), size=2, member=i) for i, segment in enumerate((mixed, current))]
    learner = Learner(copy.deepcopy(fresh_model), TrainerSettings(), 6)
    rows, tally = rows_of([group_of(trajectories)], 6, 2)
    logits = torch.log_softmax(learner.model(input_ids=torch.tensor([[2, 3, 4, 5]])).logits[0].double(), -1)
    gaps = [abs(logits[1, 4].item() + 4.0), abs(logits[2, 5].item() + 3.9)]
    statistics = learner.step(pack(rows, tally, 4096))
    assert statistics.gap_tokens == 2
    assert statistics.logprob_gap_mean == pytest.approx(sum(gaps) / 2, rel=1e-4)
    assert statistics.logprob_gap_max == pytest.approx(max(gaps), rel=1e-4)
    assert statistics.logprob_gap_mean_all == pytest.approx(sum(gaps) / 2, rel=1e-4)


def test_the_learning_rate_ramps_up() -> None:
    learner = Learner(build_model(0, hidden_size=32, layers=1), TrainerSettings(learning_rate=1e-3, warmup_steps=5))
    assert [learner.learning_rate(version) for version in (0, 1, 4, 5, 100)] == pytest.approx(
        [2e-4, 4e-4, 1e-3, 1e-3, 1e-3]
    )
