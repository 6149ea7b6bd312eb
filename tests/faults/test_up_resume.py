"""`rollmesh up --resume`: a run goes on after Ctrl-C and after the supervisor's death, to the end that it was to have."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.interruptions import SMALL, check_end, interrupt_at_random
from tests.support.mesh_command import end_by, run_command, running_up, warm_start

STEPS = 14


@pytest.mark.e2e
def test_a_run_goes_on_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = (*SMALL, "--steps", str(STEPS), warm_start())
    with running_up(run_dir, *arguments) as mesh:
        mesh.wait_for_steps(6)
        end_by(mesh, signal.SIGKILL)
    done = run_command(["up", "--resume", str(run_dir), "--plain"], deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    check_end(run_dir, STEPS)


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_at_random_moments_changes_nothing(tmp_path: Path, redis_url: str) -> None:
    """Each time it goes on by the command that it prints; a process of its own comes to the same final bytes."""
    assert interrupt_at_random(tmp_path / "run", redis_url, moments=3, seed=7, steps=60) >= 2


def test_what_cannot_be_gone_on_with_is_refused(tmp_path: Path) -> None:
    nothing = run_command(["up", "--resume", str(tmp_path)])
    assert (nothing.code, "holds no run" in nothing.err) == (2, True)
    others = run_command(["up", "--resume", str(tmp_path), "--steps", "5"])
    assert (others.code, "settings that the run began with" in others.err) == (2, True)
    (tmp_path / "run-id").write_text("r\n")
    (tmp_path / "config.toml").write_text("steps = 5\n")
    gone = run_command(["up", "--resume", str(tmp_path)])
    assert (gone.code, "is gone, where the run was kept" in gone.err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "run-id"]
