"""K means K in a live run of two servers and the other built-in task: one of them stands still for many steps, and comes
back with what it held."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.mesh_command import Running, processes_of_runs_in, running_up, summary_of, warm_start

pytestmark = pytest.mark.e2e
STEPS, K = 40, 1


def rollout_servers(mesh: Running) -> list[psutil.Process]:
    return [process for process in mesh.descendants() if "rollout-server" in process.cmdline()]


def test_no_token_over_k_is_trained_when_a_server_stops_and_goes_on(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    settings = ["rollout.groups_per_step=4", "weights.stage_timeout_s=1", "rollout.lookahead=64"]
    settings += ["evaluation.problems=32", warm_start("guess-number")]
    arguments = ["--task", "guess-number", "--servers", "2", "--engine", "torch", "--k", str(K), "--steps", str(STEPS)]
    with running_up(run_dir, *arguments, *settings) as mesh:
        mesh.wait_for_steps(4)
        stopped = rollout_servers(mesh)[1]
        stopped.send_signal(signal.SIGSTOP)
        mesh.wait_for_steps(mesh.steps() + 4 * (K + 1))
        stopped.send_signal(signal.SIGCONT)
        done = mesh.finish(90.0)
        assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    summary = summary_of(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == len(lines) == STEPS
    assert max(line["staleness_max"] for line in lines) <= K
    assert {int(age) for line in lines for age in line["staleness_histogram"]} <= {*range(K + 1)}
    assert sum(line["masked_tokens"] for line in lines) > 0, "guesses of an episode may lie more than a step apart"
    assert 0 < summary["masked_fraction"] < 0.5
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert summary["weights_digest_match"] is True
    assert summary["warnings"] == {}
    assert STEPS // 2 <= summary["commits"] <= 2 * STEPS, "one on each server for a version, at most"
    # One address in front of both, and the environment knew no other.
    address = re.search(r"gateway is ready at (http://\S+)", done.out)
    assert address is not None, done.out
    assert f"urls=['{address[1]}']" in (run_dir / "logs" / "environment.log").read_text()
    assert processes_of_runs_in(run_dir) == []
