"""`rollmesh up --resume`: a run goes on after Ctrl-C and after the supervisor's death, to the end that it was to have."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import sleep

import pytest

from tests.support.mesh_command import left_behind, run_command, running, running_up, summary_of, warm_start

STEPS = 14
MOMENTS = 3
SMALL = ("--engine", "torch", "--steps", str(STEPS), "evaluation.problems=32", "rollout.groups_per_step=4")

NOTIFY = 'notify=echo "$ROLLMESH_OUTCOME" >> "$ROLLMESH_RUN_DIR/outcomes"'


def interrupt(run_dir: Path, which: signal.Signals, after: int) -> str:
    """Start a run, end it by the signal after so many steps; returns what it said."""
    with running_up(run_dir, *SMALL, "trainer.deterministic=true", NOTIFY, warm_start()) as mesh:
        mesh.wait_for_steps(after)
        started = mesh.descendants()
        mesh.process.send_signal(which)
        done = mesh.finish(60.0)
        assert left_behind(started) == []
    return done.out


def end_of(run_dir: Path) -> None:
    """The run was made to its end, each step once, nothing lost."""
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    summary = summary_of(run_dir)
    assert summary["steps"] == summary["final_version"] == STEPS, "deterministic: no version was skipped"
    assert summary["weights_digest_match"] is True
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert summary["max_staleness"] <= 2


@pytest.mark.e2e
def test_a_run_goes_on_after_ctrl_c_by_the_command_that_it_prints(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    said = interrupt(run_dir, signal.SIGINT, 4)
    printed = re.search(r"go on with: rollmesh (up --resume \S+)", said)
    assert printed is not None, said
    assert re.search(rf"\d+ of {STEPS} steps are made", said)
    assert (run_dir / "curves.png").exists()
    assert list((run_dir / "checkpoints").glob("step-*"))
    done = run_command([*printed[1].split(), "--plain"], deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    end_of(run_dir)
    assert (run_dir / "outcomes").read_text().split() == ["interrupted", "done"]
    ended = run_command(["up", "--resume", str(run_dir)])
    assert (ended.code, "has ended" in ended.err) == (2, True)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_goes_on_after_its_supervisor_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    interrupt(run_dir, signal.SIGKILL, 6)
    done = run_command(["up", "--resume", str(run_dir), "--plain"], deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    end_of(run_dir)


@pytest.mark.e2e
@pytest.mark.slow
def test_ctrl_c_at_random_moments_changes_nothing(tmp_path: Path, redis_url: str) -> None:
    """Each time it goes on by the printed command; a process of its own comes to the same final bytes."""
    run_dir, random = tmp_path / "run", Random(7)
    settings = (*SMALL, "--redis-url", redis_url, "trainer.deterministic=true", "trainer.checkpoint_every=1000")
    command: Sequence[str] = ("up", "--run-dir", str(run_dir), *settings, warm_start())
    for _ in range(MOMENTS):
        with running(run_dir, [*command, "--plain"]) as mesh:
            mesh.wait_for_steps(mesh.steps() + random.randint(1, 3))
            sleep(random.uniform(0.0, 0.3))
            started = mesh.descendants()
            mesh.process.send_signal(signal.SIGINT)
            done = mesh.finish(60.0)
            assert left_behind(started) == []
        printed = re.search(r"go on with: rollmesh (up --resume \S+)", done.out)
        assert printed is not None, done.out + done.err
        command = printed[1].split()
    done = run_command([*command, "--plain"], deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    end_of(run_dir)
    recomputed = subprocess.run(
        [sys.executable, "-P", "-m", "tests.support.recompute", str(run_dir), redis_url],
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert recomputed.returncode == 0, recomputed.stdout + recomputed.stderr
    assert int(recomputed.stdout) >= 2


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
