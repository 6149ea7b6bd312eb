"""The same rewards and logprobs, judged by TRL and by ours: advantages, losses and their gradients."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.config.training.algorithm import AdvantageSettings, CorrectionSettings, LossSettings
from tests.support.trajectories import a_rollout, a_segment, grouped
from tests.support.trl_environment import NO_TRL, TRL_PYTHON
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.algorithms.losses.objective import Objective, TokenTerms
from trainer.algorithms.losses.tokens import BatchSize

pytestmark = pytest.mark.skipif(not TRL_PYTHON.exists(), reason=NO_TRL)

SCRIPT = Path(__file__).with_name("trl_oracle.py")
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


def rewards() -> list[list[float]]:
    numbers = random.Random(7)
    return [[numbers.uniform(-3, 3) for _ in range(4)] for _ in range(3)] + [[0.1] * 4, [0.0, 1.0, 1.0, 1.0]]


def vectors() -> dict[str, np.ndarray]:
    """`[ROWS, LENGTH]`; `mask` is of float64, too."""
    draw = np.random.default_rng(11)
    mask = np.arange(LENGTH) < np.array([[1], [3], [9], [5], [9], [2]])
    old = -draw.exponential(1.5, (ROWS, LENGTH))
    return {
        "logprobs": old + draw.normal(0.0, 0.6, (ROWS, LENGTH)),
        "old": old,
        "sampling": old + draw.normal(0.0, 0.5, (ROWS, LENGTH)),
        "reference": old + draw.normal(0.0, 0.3, (ROWS, LENGTH)),
        "entropy": draw.uniform(0.0, 3.0, (ROWS, LENGTH)),
        "mask": mask.astype(np.float64),
        "advantages": draw.normal(0.0, 1.0, ROWS),
    }


@pytest.fixture(scope="module")
def theirs(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process for all: importing TRL takes longer than what it computes."""
    folder = tmp_path_factory.mktemp("trl")
    given = {name: array.tolist() for name, array in vectors().items()} | {
        "cases": {n: c for n, (_, c) in CASES.items()}
    }
    (folder / "vectors.json").write_text(json.dumps(given))
    (folder / "rewards.json").write_text(json.dumps(rewards()))
    files = {"model": tiny_policy, **{name: folder / f"{name}.json" for name in ("rewards", "vectors", "out")}}
    options = [str(word) for name, path in files.items() for word in (f"--{name}", path)]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    ran = subprocess.run(
        [TRL_PYTHON, SCRIPT, *options], capture_output=True, text=True, timeout=300, env=quiet, cwd=folder
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_advantages_are_those_of_trl(theirs: dict[str, Any]) -> None:
    groups = rewards()
    choices = {
        "grpo": AdvantageSettings(),
        "dr_grpo": AdvantageSettings(std=False),
        "rloo": AdvantageSettings(estimator="rloo"),
    }
    played = [
        a_rollout([a_segment([5], [6], [-1.0], [0])], reward, group=f"g{number}", size=4, member=member)
        for number, group in enumerate(groups)
        for member, reward in enumerate(group)
    ]
    for name, choice in choices.items():
        credits, _ = AdvantageComputer(choice).of(grouped(played))
        ours = [float(credit.advantages[0][-1]) for credit in credits.values()]
        assert len(theirs["advantages"][name]) == len(ours) == 20
        np.testing.assert_allclose(ours, theirs["advantages"][name], rtol=0.0, atol=1e-6, err_msg=name)


def test_losses_are_those_of_trl(theirs: dict[str, Any]) -> None:
    given = vectors()
    mask = given["mask"] > 0
    for name, (settings, _) in CASES.items():
        loss, gradient = ours(settings, given, mask)
        assert loss == pytest.approx(theirs["losses"][name]["loss"], abs=1e-9), name
        np.testing.assert_allclose(
            gradient, np.array(theirs["losses"][name]["gradient"])[mask], atol=1e-9, err_msg=name
        )


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
