"""An algorithm of the user's own is looked at before a run begins: its settings are told whole, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.fitting import value_of
from services.config.load import load_settings
from services.supervisor.user_code import with_algorithm
from services.wire.errors import UsageError

CODE = """
from services.config.base import Section
from trainer.algorithms.losses.registry import LossEntry


class Own(Section):
    decay: float = 0.5
    rounds: int = 3


def own(tokens, settings, own): ...


own.entry = LossEntry("own:own", "{decay}^{rounds}·A", settings=Own)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_of_user.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_its_settings_are_told_with_their_defaults_and_its_file_wherever_it_is_read_again(folder: Path) -> None:
    settings = load_settings(None, ["trainer.loss.policy=own_of_user.py:own", "trainer.loss.own.decay=0.25"])
    whole, added = await with_algorithm(settings)
    assert whole.trainer.loss.own == {"decay": 0.25, "rounds": 3}
    assert whole.trainer.loss.policy == f"{folder}/own_of_user.py:own"
    assert added == {"trainer.loss.own.rounds": f"default of {folder}/own_of_user.py:own"}
    assert value_of(whole, "trainer.loss.own.rounds") == 3


async def test_a_key_that_it_has_not_is_refused_with_the_nearest(folder: Path) -> None:
    settings = load_settings(None, ["trainer.loss.policy=own_of_user:own", "trainer.loss.own.decoy=0.25"])
    with pytest.raises(UsageError, match=r"unknown key 'trainer\.loss\.own\.decoy'.*'trainer\.loss\.own\.decay'"):
        await with_algorithm(settings)


async def test_built_in_ones_import_nothing(folder: Path) -> None:
    settings = load_settings(None, [])
    assert await with_algorithm(settings) == (settings, {})
