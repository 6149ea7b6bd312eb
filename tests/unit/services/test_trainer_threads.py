"""Threads of the trainer: what engines leave, one for a tiny policy, and a number in the run's file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.settings import RolloutSettings, RunSettings, TrainerSettings
from services.policies.training.threads import MOST, threads_left


@given(st.integers(1, 256), st.integers(1, 512))
def test_a_trainer_has_a_thread_and_never_more_than_cores(cores: int, engines: int) -> None:
    assert threads_left(cores, engines, tiny=True) == 1
    assert 1 <= threads_left(cores, engines, tiny=False) <= min(cores, MOST)
    assert threads_left(cores, engines + 2, tiny=False) <= threads_left(cores, engines, tiny=False)


def test_auto_becomes_a_number_by_cores_engines_and_model() -> None:
    assert RunSettings().with_threads(8, tiny=True).trainer.thread_count == 1
    assert RunSettings().with_threads(2, tiny=False).trainer.thread_count == 2
    crowded = RunSettings(servers=4, rollout=RolloutSettings(threads=2))
    assert crowded.with_threads(16, tiny=False).trainer.thread_count == 12
    assert RunSettings(trainer=TrainerSettings(threads=3)).with_threads(8, tiny=True).trainer.threads == 3
    with pytest.raises(ValueError, match="not resolved"):
        _ = RunSettings().trainer.thread_count
