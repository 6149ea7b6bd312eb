"""The same logprobs and advantages, judged by TRL's own loss and by ours: values and gradients."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from services.config.algorithm import CorrectionSettings, LossSettings
from tests.support.trl_environment import NO_TRL, TRL_PYTHON
from trainer.algorithms.losses.objective import Objective, TokenTerms
from trainer.algorithms.losses.tokens import BatchSize

SCRIPT = Path(__file__).with_name("trl_losses.py")
ROWS, LENGTH = 6, 9

CASES = {
    "ppo": (LossSettings(), {}),
    "dapo": (LossSettings(clip_high=0.28), {"epsilon_high": 0.28}),
    "dual_clip": (LossSettings(dual_clip=3.0), {"delta": 3.0}),
    "grpo": (LossSettings(mean="segments", kl=0.04), {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": (LossSettings(mean="fixed", fixed_length=LENGTH), {"loss_type": "dr_grpo"}),
    "cispo": (LossSettings(policy="cispo", clip_low=1.0, clip_high=4.0), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "gspo": (
        LossSettings(policy="gspo", mean="segments", clip_low=0.03, clip_high=0.04),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    ),
    "entropy": (LossSettings(entropy=0.01), {"entropy_coef": 0.01}),
    "tis": (
        LossSettings(anchor="proximal", correction=CorrectionSettings(weight="token", cap=2.0)),
        {"cap": 2.0},
    ),
}


@pytest.mark.skipif(not TRL_PYTHON.exists(), reason=NO_TRL)
def test_losses_are_those_of_trl(tmp_path: Path) -> None:
    draw = np.random.default_rng(11)
    mask = np.arange(LENGTH) < np.array([[1], [3], [9], [5], [9], [2]])
    old = -draw.exponential(1.5, (ROWS, LENGTH))
    given = {
        "logprobs": old + draw.normal(0.0, 0.6, (ROWS, LENGTH)),
        "old": old,
        "sampling": old + draw.normal(0.0, 0.5, (ROWS, LENGTH)),
        "reference": old + draw.normal(0.0, 0.3, (ROWS, LENGTH)),
        "entropy": draw.uniform(0.0, 3.0, (ROWS, LENGTH)),
        "mask": mask.astype(np.float64),
        "advantages": draw.normal(0.0, 1.0, ROWS),
    }
    vectors = {name: array.tolist() for name, array in given.items()} | {"cases": {n: c for n, (_, c) in CASES.items()}}
    (tmp_path / "vectors.json").write_text(json.dumps(vectors))
    files = [*("--vectors", tmp_path / "vectors.json"), *("--out", tmp_path / "found.json")]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [TRL_PYTHON, SCRIPT, *files], capture_output=True, text=True, timeout=300, env=quiet, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    theirs = json.loads((tmp_path / "found.json").read_text())
    for name, (settings, _) in CASES.items():
        loss, gradient = ours(settings, given, mask)
        assert loss == pytest.approx(theirs[name]["loss"], abs=1e-9), name
        np.testing.assert_allclose(gradient, np.array(theirs[name]["gradient"])[mask], atol=1e-9, err_msg=name)


def ours(settings: LossSettings, given: dict[str, np.ndarray], mask: np.ndarray) -> tuple[float, np.ndarray]:
    """Loss, and its gradient after the logprobs of the masked tokens, row by row."""

    def flat(name: str) -> torch.Tensor:
        return torch.from_numpy(given[name][mask])

    objective = Objective(settings)
    logprobs = flat("logprobs").requires_grad_()
    segment = torch.from_numpy(np.nonzero(mask)[0])
    terms = TokenTerms(
        logprobs=logprobs,
        behaviour=flat("sampling" if objective.needs_proximal else "old"),
        proximal=flat("old") if objective.needs_proximal else None,
        advantages=torch.from_numpy(given["advantages"])[segment],
        staleness=torch.zeros(len(segment), dtype=torch.float64),
        segment=segment,
        segments=ROWS,
        reference=flat("reference") if objective.needs_reference else None,
        entropy=flat("entropy") if objective.needs_entropy else None,
    )
    size = BatchSize(tokens=len(segment), segments=ROWS)
    loss = objective.mean(objective(terms).loss, segment, ROWS, size)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.numpy()
