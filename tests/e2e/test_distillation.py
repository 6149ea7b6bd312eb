"""On-policy distillation as a user starts it: a teacher of its own process, and a policy that learns without a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.large_teacher import large_teacher
from tests.support.mesh_command import processes_of_runs_in, run_command, summary_of, warm_start

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_policy_comes_to_its_teachers_success_without_a_reward(tmp_path: Path) -> None:
    run_dir, teacher = tmp_path / "run", large_teacher()
    # At a constant rate the policy wanders about its teacher to the end: one run in three ended below the bar.
    settings = ["trainer.advantage.estimator=opd", f"trainer.teacher.model={teacher}", "trainer.schedule.kind=linear"]
    arguments = ["up", "--seed", "1", "--engine", "torch", "--steps", "60", "--run-dir", str(run_dir)]
    done = run_command([*arguments, *settings, warm_start()], deadline_s=240.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert "teacher is ready at http" in done.out
    summary = summary_of(run_dir)
    assert summary["success_before"] < 0.5
    measured = ["eval", "--task", "running-sums", "--temperature", "1", "--problems", "256", "--json"]
    of_teacher = run_command([*measured, "--engine", "torch", "seed=1", f"model.path={teacher}"], deadline_s=120.0)
    assert of_teacher.code == 0, of_teacher.err
    assert summary["success_after"] >= 0.95 * json.loads(of_teacher.out)["success"]
    assert summary["warnings"] == {}
    assert summary["weights_digest_match"] is True
    # Of the run's own engine alone.
    assert 20 <= summary["commits"] <= 60
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["teacher_kl"] < 0.1 * lines[0]["teacher_kl"]
    assert processes_of_runs_in(run_dir) == []


def test_a_teacher_that_nobody_reads_is_refused_before_anything_starts(tmp_path: Path) -> None:
    arguments = ["up", "--run-dir", str(tmp_path / "run"), f"trainer.teacher.model={tmp_path}"]
    done = run_command(arguments)
    assert done.code == 2
    assert "trainer.teacher.model=" in done.err and "would have no effect" in done.err
    assert not (tmp_path / "run").exists()
