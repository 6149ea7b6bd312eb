"""What TRL makes of rewards: its trainers score one batch of answers, whose rewards are given. Imports nothing of rollmesh.

    python trl_advantages.py --model DIR --rewards FILE --out FILE

`rewards`: JSON, a list of groups' lists. `out`: JSON, for each estimator the advantages in the same order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--rewards", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    groups: list[list[float]] = json.loads(arguments.rewards.read_text())
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
        "output_dir": str(arguments.out.parent / "trl"),
    }
    runs: dict[str, tuple[Any, Any]] = {
        "grpo": (GRPOTrainer, GRPOConfig(scale_rewards="group", **shared)),
        "dr_grpo": (GRPOTrainer, GRPOConfig(scale_rewards="none", **shared)),
        "rloo": (RLOOTrainer, RLOOConfig(**shared)),
    }
    found = {name: reward_batch(base, config, arguments.model, groups) for name, (base, config) in runs.items()}
    arguments.out.write_text(json.dumps(found))


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


if __name__ == "__main__":
    main()
