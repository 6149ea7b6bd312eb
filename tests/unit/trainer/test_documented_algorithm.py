"""The algorithm that the docs add runs as it stands there: named in the settings, told in the formula, and it learns."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from services.config.algorithm import AdvantageSettings
from services.config.settings import RunSettings, TrainerSettings
from services.wire.errors import UsageError
from tests.support.one_token_task import play
from tests.support.trajectories import grouped
from trainer.algorithms.describe import describe
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.roles import make_roles
from trainer.sft.tiny_model import build_model

DOCUMENT = Path(__file__).parents[3] / "docs/algorithms.md"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdvantageSettings:
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) < 40
    (tmp_path / "wins.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    return AdvantageSettings(estimator="wins:wins")


def test_it_is_told_and_what_it_does_not_read_is_refused(own: AdvantageSettings) -> None:
    assert "A = (siblings beaten − siblings that did better) / (n − 1)" in describe(TrainerSettings(advantage=own))
    with pytest.raises(UsageError, match=r"discount=0\.5 would have no effect"):
        describe(TrainerSettings(advantage=own.model_copy(update={"discount": 0.5})))


def test_it_credits_and_learns(own: AdvantageSettings) -> None:
    settings = RunSettings(trainer=TrainerSettings(learning_rate=5e-3, advantage=own))
    roles = make_roles(lambda: build_model(seed=1, hidden_size=32, layers=1), settings, 0)
    generator = torch.Generator().manual_seed(1)
    success = []
    for step in range(30):
        rollouts = play(roles.learner.model, step, roles.learner.version, generator)
        groups = grouped(rollouts)
        credits, _ = roles.advantage_computer.of(groups)
        rewards = [member.payload.reward for member in groups[0].members]
        for member in groups[0].members:
            beaten = sum(np.sign(member.payload.reward - reward) for reward in rewards)
            assert float(credits[member.entry].advantages[0][-1]) == pytest.approx(beaten / 7, rel=1e-6)
        rows, tally = rows_of(groups, roles.learner.version, 0, credits)
        roles.learner.step(pack(rows, tally, 4096))
        success.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
    assert np.mean(success[-5:]) > 2 * np.mean(success[:5])
