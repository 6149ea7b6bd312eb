"""What a step takes of the device: its operations are those that torch counts, its memory is told."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.config.settings import TrainerSettings
from services.policies.training.flops import StepCost, peak_flops
from tests.support.trajectories import grouped, random_trajectories
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.memory.device_use import Gauge, step_cost
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model

TOKENS = 64


def mixture() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def test_a_dense_step_costs_what_torch_counts() -> None:
    model = build_model(seed=1, hidden_size=64, layers=3)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(TOKENS)[None] % 50).logits.sum().backward()
    # Eager attention computes also what the causal mask takes away: as if half of the tokens stood before.
    assert step_cost(model, frozen=False).flops([(TOKENS, TOKENS // 2, 1)]) == pytest.approx(
        counter.get_total_flops(), rel=0.01
    )


def test_of_experts_only_those_that_are_chosen_count() -> None:
    model = mixture()
    every = sum(weight.numel() for name, weight in model.named_parameters() if "experts" in name)
    rest = sum(
        weight.numel() for name, weight in model.named_parameters() if weight.ndim == 2 and "experts" not in name
    )
    # The embedding is no product; the router is, and stands beside the experts.
    embedding = model.get_input_embeddings().weight.numel()
    router = 2 * 64 * 8
    counted = step_cost(model, frozen=False).weights
    assert rest - embedding + every / 4 - router <= counted <= rest - embedding + every / 4 + router


def test_rows_that_share_a_prefix_cost_it_once() -> None:
    cost = StepCost(weights=1000, attention=10)
    products = StepCost(weights=1000, attention=0)
    apart = products.flops([(100, 0, 2)])
    assert cost.flops([(100, 0, 1)]) == pytest.approx(cost.flops([(50, 0, 1), (50, 50, 1)]))
    assert products.flops([(50, 0, 1), (50, 50, 2)]) == pytest.approx(0.75 * apart)
    assert StepCost(1000, 0, frozen=True).flops([(100, 0, 2)]) < apart
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA T4") is None


def test_a_learner_tells_the_memory_of_its_process_and_no_share_of_a_peak_that_is_not_known() -> None:
    learner = Learner(build_model(seed=1, hidden_size=32, layers=1), TrainerSettings())
    rows, tally = rows_of(grouped(random_trajectories(1, groups=2, size=3)), learner.version, 100)
    batch = pack(rows, tally, 4096, learner.model.device, learner.stem_width)
    used = learner.gauge.read(batch, 1.0)
    assert used.memory_bytes > 50 << 20
    assert used.mfu is None
    known = Gauge(learner.model, learner.stem_width, frozen=False, peak=1e12)
    mfu = known.read(batch, 1.0).mfu
    assert mfu is not None and 0.0 < mfu < 1e-3
