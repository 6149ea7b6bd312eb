"""What `rollmesh memory` says of a GPU against what torch's allocator gave out for the very steps."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.trainer.plan_cases import Case, sized
from benchmarks.trainer.planned import config_of, predicted, settings_of
from trainer.memory.options import Machine
from trainer.model.roles import make_roles
from trainer.planning.step import full_batch, run_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

MODEL = sized(1024, 8, (16, 8, 64), 3072, 32_768)
EXPERTS = sized(
    512, 6, (8, 4, 64), 1536, 16_384, kind="qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512
)
FULL = "trainer.activation_checkpointing=full"


def allocated(case: Case) -> int:
    """The most bytes of tensors, above those that were there."""
    settings, config, before = settings_of(case), config_of(case), torch.cuda.memory_allocated()

    def load() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.to("cuda")

    roles = make_roles(load, settings, 0)
    for passes in (1, 2):
        # The plan is of the second step, when the optimizer has its state.
        torch.cuda.reset_peak_memory_stats()
        run_step(roles, full_batch(roles, settings.trainer.micro_batch_tokens, passes=passes))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("configuration", "overrides"),
    [
        (MODEL, []),
        (MODEL, ["trainer.dtype=float32"]),
        (MODEL, ["trainer.activation_checkpointing=selective"]),
        (MODEL, [FULL, "trainer.activation_offload=true", "trainer.optimizer.offload=true"]),
        (MODEL, ["trainer.lora.rank=16"]),
        (MODEL, [FULL, "trainer.advantage.estimator=gae", "trainer.loss.kl=0.1"]),
        (EXPERTS, [FULL]),
    ],
    ids=["plain", "float32", "selective", "offloaded", "adapters", "critic and reference", "experts"],
)
def test_a_step_takes_what_was_predicted(configuration: dict[str, object], overrides: list[str]) -> None:
    case = Case("on a GPU", configuration, ["trainer.micro_batch_tokens=8192", *overrides])
    machine = Machine(1, torch.cuda.get_device_properties(0).total_memory)
    taken = allocated(case)
    assert predicted(case, machine).tightest.total == pytest.approx(taken, rel=0.05)
