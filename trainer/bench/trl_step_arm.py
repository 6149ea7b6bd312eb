"""TRL's GRPO step, without its generation: `GRPOTrainer.train` on one batch that is given, a step whenever it is asked for.

Runs in an environment of its own and imports nothing of rollmesh. A line on standard input asks for a step; the answer is
one JSON line with the seconds that it took, from before its first micro-batch to after the optimizer's step.

    python trl_step_arm.py --model DIR --answers FILE --rows N --threads N --scratch DIR
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_MOST_STEPS = 1_000_000


def main() -> None:
    arguments = _parse()
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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--answers", type=Path, required=True, help="JSON: trainer.bench.heavy_tail.Answer, group by group"
    )
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True, help="Of a forward/backward pass")
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
