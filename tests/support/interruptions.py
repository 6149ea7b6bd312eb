"""A run that is interrupted by Ctrl-C again and again, each time gone on with by the command that it prints.

python -m tests.support.interruptions RUN_DIR REDIS_URL MOMENTS SEED STEPS ──► "recomputed N steps", or what does not hold
"""

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

from tests.support.mesh_command import end_by, run_command, running, summary_of, warm_start
from tests.support.suite import heed_interrupts, share_a_folder

SMALL = ("--engine", "torch", "evaluation.problems=32", "rollout.groups_per_step=4", "trainer.deterministic=true")
NOTIFY = 'notify=echo "$ROLLMESH_OUTCOME" >> "$ROLLMESH_RUN_DIR/outcomes"'


def interrupt_at_random(run_dir: Path, redis_url: str, *, moments: int, seed: int, steps: int) -> int:
    """Interrupt a run of so many steps, 1 to 3 after it went on, and some that it makes meanwhile.

    Returns how many steps a process of its own computed once more, to the same final bytes. Raises AssertionError.
    """
    random = Random(seed)
    settings = (*SMALL, "--steps", str(steps), "--redis-url", redis_url, "trainer.checkpoint_every=1000", NOTIFY)
    command: Sequence[str] = ("up", "--run-dir", str(run_dir), *settings, warm_start())
    for _ in range(moments):
        with running(run_dir, [*command, "--plain"]) as mesh:
            mesh.wait_for_steps(mesh.steps() + random.randint(1, 3), deadline_s=300.0)
            sleep(random.uniform(0.0, 0.3))
            done = end_by(mesh, signal.SIGINT)
        printed = re.search(r"go on with: rollmesh (up --resume \S+)", done.out)
        assert printed is not None, done.out + done.err
        assert re.search(rf"\d+ of {steps} steps are made", done.out)
        assert (run_dir / "curves.png").exists() and list((run_dir / "checkpoints").glob("step-*"))
        command = printed[1].split()
    done = run_command([*command, "--plain"], deadline_s=600.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    check_end(run_dir, steps)
    assert (run_dir / "outcomes").read_text().split() == [*["interrupted"] * moments, "done"]
    ended = run_command(["up", "--resume", str(run_dir)])
    assert (ended.code, "has ended" in ended.err) == (2, True)
    recomputed = subprocess.run(
        [sys.executable, "-P", "-m", "tests.support.recompute", str(run_dir), redis_url],
        capture_output=True,
        text=True,
        timeout=600.0,
        check=False,
    )
    assert recomputed.returncode == 0, recomputed.stdout + recomputed.stderr
    return int(recomputed.stdout)


def check_end(run_dir: Path, steps: int) -> None:
    """The run was made to its end, each step once, nothing lost."""
    made = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert made == list(range(1, steps + 1))
    summary = summary_of(run_dir)
    assert summary["steps"] == summary["final_version"] == steps, "deterministic: no version was skipped"
    assert summary["weights_digest_match"] is True
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert summary["max_staleness"] <= 2


if __name__ == "__main__":
    folder, url, count, numbers, length = sys.argv[1:]
    heed_interrupts()
    with share_a_folder():
        repeated = interrupt_at_random(Path(folder), url, moments=int(count), seed=int(numbers), steps=int(length))
    sys.stdout.write(f"recomputed {repeated} steps\n")
