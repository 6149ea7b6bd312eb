"""What TRL makes of rewards and of logprobs, in one process, which imports it once. Imports nothing of rollmesh.

    python trl_oracle.py --model DIR --rewards FILE --vectors FILE --out FILE

`rewards`: JSON, a list of groups' lists, which its trainers score as one batch of answers. `vectors`: JSON with lists
`[B][T]` of floats (`logprobs`, `old`, `sampling`, `reference`, `entropy`, `mask`), `advantages` `[B]`, and `cases`: by name
what TRL calls it; its own `_compute_loss` is given them, without a model. `out`: JSON; `advantages`: for each estimator
those of the rewards in the same order; `losses`: for each case the loss and its gradient `[B][T]` after the logprobs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--rewards", "--vectors", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    groups, given = json.loads(arguments.rewards.read_text()), json.loads(arguments.vectors.read_text())
    advantages = advantages_of(groups, arguments.model, arguments.out.parent / "trl")
    losses = {name: judged(given, case) for name, case in given["cases"].items()}
    arguments.out.write_text(json.dumps({"advantages": advantages, "losses": losses}))


def advantages_of(groups: list[list[float]], model: Path, scratch: Path) -> dict[str, list[float]]:
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    shared: dict[str, Any] = {
        "per_device_train_batch_size": len(groups) * len(groups[0]),
        "num_generations": len(groups[0]),
        "max_completion_length": 2,
        "max_steps": 1,
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "output_dir": str(scratch),
    }
    runs: dict[str, tuple[Any, Any]] = {
        "grpo": (GRPOTrainer, GRPOConfig(scale_rewards="group", **shared)),
        "dr_grpo": (GRPOTrainer, GRPOConfig(scale_rewards="none", **shared)),
        "rloo": (RLOOTrainer, RLOOConfig(**shared)),
    }
    return {name: reward_batch(base, config, model, groups) for name, (base, config) in runs.items()}


def reward_batch(base: Any, config: Any, model: Path, groups: list[list[float]]) -> list[float]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    caught: list[float] = []

    class Catching(base):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            caught.extend(output["advantages"].double().tolist())
            return output

    def given(completions: list[str], **_: Any) -> list[float]:
        flat = [reward for group in groups for reward in group]
        assert len(completions) == len(flat)
        return flat

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = Dataset.from_list([{"prompt": "1+2="} for _ in groups])
    policy = AutoModelForCausalLM.from_pretrained(model)
    Catching(model=policy, reward_funcs=given, args=config, train_dataset=prompts, processing_class=tokenizer).train()
    return caught


def judged(given: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    from trl import GRPOTrainer

    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(given[name], dtype=torch.float64)

    logprobs = tensor("logprobs").requires_grad_()
    mask = tensor("mask")
    rows, length = mask.shape
    trainer = SimpleNamespace(
        **{
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "loss_type": "dapo",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "use_vllm": "cap" in case,
            "vllm_importance_sampling_correction": True,
            "max_completion_length": length,
            "current_gradient_accumulation_steps": 1,
            "entropy_coef": 0.0,
            "use_adaptive_entropy": False,
        }
        | {name: value for name, value in case.items() if name not in ("delta", "cap")},
        args=SimpleNamespace(delta=case.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=SimpleNamespace(num_processes=1, gather=_same, reduce=_same),
        _entropy_bonus_enabled=bool(case.get("entropy_coef")),
        _metrics={"eval": _Forgetful()},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, tensor("entropy"), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.zeros(rows, length, dtype=torch.long),
        "completion_mask": mask,
        "advantages": tensor("advantages"),
        "old_per_token_logps": tensor("old"),
        "ref_per_token_logps": tensor("reference"),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": (tensor("old") - tensor("sampling")).exp().clamp(max=case.get("cap", 1.0)),
    }
    trainer.model = SimpleNamespace(training=False)
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": logprobs.grad.tolist()}


def _same(value: Any, **_: Any) -> Any:
    return value


class _Forgetful(dict[str, list[float]]):
    def __missing__(self, _: str) -> list[float]:
        return []


if __name__ == "__main__":
    main()
