"""The same rewards, judged by TRL's own trainers and by ours."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from services.config.algorithm import AdvantageSettings
from tests.support.trajectories import a_rollout, a_segment, grouped
from tests.support.trl_environment import NO_TRL, TRL_PYTHON
from trainer.algorithms.advantages.compute import AdvantageComputer

SCRIPT = Path(__file__).with_name("trl_advantages.py")


@pytest.mark.skipif(not TRL_PYTHON.exists(), reason=NO_TRL)
def test_advantages_are_those_of_trl(tiny_policy: Path, tmp_path: Path) -> None:
    numbers = random.Random(7)
    groups = [[numbers.uniform(-3, 3) for _ in range(4)] for _ in range(3)] + [[0.1] * 4, [0.0, 1.0, 1.0, 1.0]]
    (tmp_path / "rewards.json").write_text(json.dumps(groups))
    files = [*("--model", tiny_policy), *("--rewards", tmp_path / "rewards.json"), *("--out", tmp_path / "found.json")]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    ran = subprocess.run(
        [TRL_PYTHON, SCRIPT, *files], capture_output=True, text=True, timeout=300, env=quiet, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    theirs = json.loads((tmp_path / "found.json").read_text())
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
        assert len(theirs[name]) == len(ours) == 20
        np.testing.assert_allclose(ours, theirs[name], rtol=0.0, atol=1e-6, err_msg=name)
