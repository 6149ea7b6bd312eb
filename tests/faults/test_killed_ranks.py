"""Ranks of a trainer, killed again and again in a whole mesh: bytes, account and sessions are those of a run in one go."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.trainer.killed_ranks import measure_killed_ranks, points, wrong_sessions
from tests.support.mesh_command import warm_start
from tests.support.trajectories import a_rollout, a_segment


def test_points_are_spread_over_ranks_and_one_is_in_a_checkpoint() -> None:
    found, again, other = (points(seed, 20, 60, 24) for seed in (1, 1, 2))
    assert found == again
    assert found != other
    assert [point.step for point in found if point.after_s is None] == [23]
    assert sum(point.rank for point in found) == 10
    steps = [point.step for point in found]
    assert steps == sorted(set(steps)) and steps[0] >= 1 and steps[-1] < 54


def test_a_session_that_was_not_trained_or_has_other_tokens_is_told() -> None:
    one = a_rollout([a_segment([5], [6, 7], [-1.0, -1.0], [0, 0])], 1.0, group="g")
    opened = {one.trajectory_id: [[5, 6]]}
    assert wrong_sessions(opened, {"1-0": one}, ["1-0"]) == []
    assert "was not trained" in wrong_sessions(opened, {"1-0": one}, [])[0]
    assert "was not trained" in wrong_sessions(opened, {}, ["1-0"])[0]
    assert "other tokens" in wrong_sessions({one.trajectory_id: [[5, 7]]}, {"1-0": one}, ["1-0"])[0]


@pytest.mark.e2e
async def test_a_run_whose_ranks_are_killed_is_that_of_nobody_killed(tmp_path: Path) -> None:
    """Three kills, one of them in a checkpoint; then a run on 1, 2 and 1 ranks."""
    cache = Path(warm_start("guess-number").partition("=")[2])
    said: list[str] = []
    measured = await measure_killed_ranks(
        3, said.append, kills=3, steps=16, checkpoint_every=6, regrouped_steps=9, cache=cache
    )
    assert measured.rounds == {"resume_equal": [1.0], "resume_conflicts": [0.0]}, measured.seen
    assert "16 steps repeated from the first weights, 0 of" in measured.seen["3 kills of 2 ranks"]
    assert " 0 sessions were open" not in measured.seen["3 kills of 2 ranks"]
    assert "1 rank from version 0 on, 2 data from version" in measured.seen["1, 2 and 1 ranks"]
    assert len(said) == 4
