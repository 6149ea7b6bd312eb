"""Several ranks with a GPU each, over NCCL: the step of one GPU, what publishing holds up, the use of the cards."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.trainer.device import OF_1_7B
from services.policies.training.flops import peak_flops
from tests.support.device_ranks import on_devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]
RANKS, TOKENS, ROW = 2, 8192, 2048
LEAST_MFU = 0.45
"""As of one device (`mfu_full` of the trainer's benchmark)."""


async def test_two_gpus_make_the_step_of_one(tmp_path: Path) -> None:
    trainer = {"learning_rate": 0.05, "warmup_steps": 0, "micro_batch_tokens": 120, "clip_grad_norm": 0.5}
    settings = {"k": 3, "trainer": trainer | {"dtype": "float32", "tf32": False, "advantage": {"estimator": "gae"}}}
    alone, both = [
        dict(np.load(await on_devices(ranks, "steps", {"settings": settings}, tmp_path))) for ranks in (1, RANKS)
    ]
    assert alone.keys() == both.keys()
    for name, wanted in alone.items():
        most = float(np.abs(wanted).max()) or 1.0
        assert float(np.abs(both[name] - wanted).max()) <= 1e-4 * most, name


async def test_publishing_holds_up_training_for_little_more_than_a_pinned_copy(tmp_path: Path, run_id: str) -> None:
    arguments = {"shape": asdict(OF_1_7B), "rounds": 6, "run_id": run_id}
    found = json.loads((await on_devices(RANKS, "publishing", arguments, tmp_path)).read_text())
    assert found["blocked_s"] <= 1.2 * found["copy_s"], found


async def test_two_gpus_are_used_as_one_is(tmp_path: Path) -> None:
    card = torch.cuda.get_device_name()
    peak = peak_flops(card)
    if peak is None:
        pytest.skip(f"the peak of {card} is not known here")
    arguments = {"shape": asdict(OF_1_7B), "tokens": TOKENS, "row": ROW, "rounds": 5}
    seconds = json.loads((await on_devices(RANKS, "speed", arguments, tmp_path)).read_text())
    assert OF_1_7B.flops(TOKENS, ROW, frozen=False) / seconds / peak >= LEAST_MFU
