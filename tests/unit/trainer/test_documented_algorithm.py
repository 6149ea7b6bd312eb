"""The algorithms that the docs add run as they stand there: named in the settings, told in the formula, and they learn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.wire.errors import UsageError
from tests.support.one_token_task import play
from tests.support.trajectories import grouped
from trainer.algorithms.describe import describe, own_tables
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.roles import make_roles
from trainer.model.train_batch import train_batch
from trainer.sft.tiny_model import build_model

DOCUMENT = Path(__file__).parents[3] / "docs/algorithms.md"


def write_blocks(folder: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name, block in zip(("wins", "fading"), blocks, strict=True):
        assert len(block.splitlines()) < 40
        (folder / f"{name}.py").write_text(block)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AdvantageSettings:
    write_blocks(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return AdvantageSettings(estimator="wins:wins")


@pytest.fixture
def fading(tmp_path: Path) -> str:
    write_blocks(tmp_path)
    return f"{tmp_path}/fading.py:fading"


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


def test_the_loss_is_told_with_its_setting_and_wrong_keys_are_refused(fading: str) -> None:
    chosen = TrainerSettings(loss=LossSettings(policy=fading, own={"decay": 0.8}))
    (shown,) = re.findall(r"^\$ rollmesh formula .*\n((?:[LNAt].*\n)+)", DOCUMENT.read_text(), flags=re.MULTILINE)
    table = "".join(f"trainer.loss.own.{key} = {value}\n" for key, value in own_tables(chosen)[0].items())
    assert describe(chosen).replace(";  ", "\n") + f"\n{table}" == shown
    with pytest.raises(UsageError, match=r"unknown key 'trainer.loss.own.decai': the nearest known key is .*own.decay"):
        describe(TrainerSettings(loss=LossSettings(policy=fading, own={"decai": 0.8})))
    with pytest.raises(UsageError, match=r"own.decay = 2.0 cannot be"):
        describe(TrainerSettings(loss=LossSettings(policy=fading, own={"decay": 2.0})))


def test_the_loss_counts_older_tokens_for_less(fading: str) -> None:
    chosen = LossSettings(policy=fading, own={"decay": 0.8})
    settings = RunSettings(k=9, trainer=TrainerSettings(learning_rate=5e-3, loss=chosen))
    roles = make_roles(lambda: build_model(seed=1, hidden_size=32, layers=1), settings, 3)
    generator = torch.Generator().manual_seed(1)
    stale = grouped(play(roles.learner.model, 0, 0, generator))
    assert train_batch(roles, settings, stale, 1)[0].statistics.figures == {"weight": pytest.approx(0.8**3)}
    success = []
    for step in range(1, 31):
        rollouts = play(roles.learner.model, step, roles.learner.version, generator)
        (trained,) = train_batch(roles, settings, grouped(rollouts), 1)
        assert trained.statistics.figures == ({"weight": pytest.approx(1.0)} if trained.rows else {})
        success.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
    assert np.mean(success[-5:]) > 2 * np.mean(success[:5])
