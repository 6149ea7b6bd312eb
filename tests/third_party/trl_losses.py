"""What TRL's GRPO loss is on given logprobs: its own `_compute_loss`, without a model. Imports nothing of rollmesh.

    python trl_losses.py --vectors FILE --out FILE

`vectors`: JSON with lists `[B][T]` of floats (`logprobs`, `old`, `sampling`, `reference`, `entropy`, `mask`), `advantages`
`[B]`, and `cases`: by name what TRL calls it. `out`: JSON, for each case the loss and its gradient `[B][T]` after the
logprobs.
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
    for name in ("--vectors", "--out"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    given = json.loads(arguments.vectors.read_text())
    arguments.out.write_text(json.dumps({name: judged(given, case) for name, case in given["cases"].items()}))


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
