"""What a user would pick instead: TRL's GRPOTrainer on the same model folder, problems, batch and steps.

Runs in an environment of its own (TRL pins clash with nothing today, but need not tomorrow) and imports nothing of
rollmesh. Writes one JSON line an optimizer step: `{"step", "time", "success", "length"}`, after a first line
`{"step": 0, "time"}` when the first generation begins. Times are Unix seconds.

    python trl_arm.py --model DIR --problems FILE --steps N --groups N --group-size N --max-tokens N --seed N --out FILE
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    arguments = _parse()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads)
    problems = [json.loads(line) for line in arguments.problems.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    record = Record(arguments.out)

    def right_digit(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(is_right(text, wanted)) for text, wanted in zip(completions, answer, strict=True)]
        record.success = sum(rewards) / len(rewards)
        record.length = sum(len(text) + 1 for text in completions) / len(completions)
        return rewards

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            record.write(0)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            record.write(int(state.global_step))

    batch = arguments.groups * arguments.group_size
    micro = min(arguments.micro_batch, batch)
    config = GRPOConfig(
        output_dir=str(arguments.out.parent / "trl"),
        max_steps=arguments.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        num_generations=arguments.group_size,
        max_completion_length=arguments.max_tokens,
        temperature=1.0,
        learning_rate=arguments.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        warmup_steps=5,
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="dapo",
        scale_rewards="group",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        seed=arguments.seed,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=right_digit,
        args=config,
        train_dataset=Dataset.from_list(problems),
        callbacks=[Watch()],
    )
    trainer.train()


def is_right(completion: str, answer: str) -> bool:
    """The last character, after whatever scratchpad, is the answer."""
    return completion.endswith(answer)


class Record:
    """Appends a line a step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.success: float | None = None
        self.length: float | None = None

    def write(self, step: int) -> None:
        line = {"step": step, "time": time.time(), "success": self.success, "length": self.length}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True, help='JSONL of {"prompt", "answer"}')
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (
        ("--steps", 60),
        ("--groups", 16),
        ("--group-size", 8),
        ("--max-tokens", 24),
        ("--micro-batch", 64),
        ("--seed", 1),
        ("--threads", 2),
    ):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
