"""The alternative: TRL's GRPOTrainer, whole runs and single steps.

Runs in an environment of its own (TRL pins clash with nothing today, but need not tomorrow) and imports nothing of
rollmesh.

`train`: the same model folder, problems, batch and steps as the mesh. Writes one JSON line an optimizer step:
`{"step", "time", "success", "length"}`, after a first line `{"step": 0, "time"}` when the first generation begins. Times
are Unix seconds.

`step`: without generation, on one batch that is given. A line on standard input asks for a step; the answer is one JSON
line with the seconds that it took, from before its first micro-batch to after the optimizer's step.

    python trl_arms.py train --model DIR --problems FILE --steps N --groups N --group-size N --max-tokens N --seed N
    --out FILE python trl_arms.py step --model DIR --answers FILE --rows N --threads N --scratch DIR
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def train() -> None:
    """The arm `train`: GRPOTrainer as a user would start it."""
    arguments = _parse_train()
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


def _parse_train() -> argparse.Namespace:
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


_MOST_STEPS = 1_000_000


def step() -> None:
    """The arm `step`: one line on standard output a step, whenever standard input asks for one."""
    arguments = _parse_step()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch
    import trl
    from datasets import Dataset
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(arguments.threads)
    answers = json.loads(arguments.answers.read_text())
    # As TRL lays its own batches out: prompts padded on the left, completions on the right, to the longest of the batch.
    prompts = [torch.tensor(answer["prompt"]) for answer in answers]
    completions = [torch.tensor(answer["completion"]) for answer in answers]
    batch = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(row) for row in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(row) for row in completions], batch_first=True),
        "advantages": torch.tensor([answer["advantage"] for answer in answers]),
        "num_items_in_batch": torch.tensor(sum(len(row) for row in completions)),
    }

    def reply(line: dict[str, Any]) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    class GivenBatch(trl.GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:  # noqa: ARG002
            return dict(batch)

    class InTurn(TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_step_begin(self, _: Any, __: Any, control: Any, **___: Any) -> Any:
            if not sys.stdin.readline():
                os._exit(0)
            self.started = time.perf_counter()
            return control

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> Any:
            reply({"seconds": time.perf_counter() - self.started, "trl": trl.__version__})
            return control

    config = trl.GRPOConfig(
        output_dir=str(arguments.scratch),
        max_steps=_MOST_STEPS,
        per_device_train_batch_size=arguments.rows,
        gradient_accumulation_steps=len(answers) // arguments.rows,
        num_generations=arguments.group_size,
        max_completion_length=batch["completion_ids"].shape[1],
        learning_rate=arguments.learning_rate,
        adam_beta1=0.9,
        adam_beta2=0.99,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="dapo",
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    trainer = GivenBatch(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * len(answers)),
        callbacks=[InTurn()],
    )
    reply({})
    trainer.train()


def _parse_step() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--answers", type=Path, required=True, help="JSON: benchmarks.trainer.step_speed.Answer, group by group"
    )
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="Of a forward/backward pass")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    {"train": train, "step": step}[sys.argv.pop(1)]()
