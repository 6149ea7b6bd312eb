"""`rollmesh doctor` finds nothing in healthy runs of both tasks: while they run, and when they have ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mesh_command import run_command, running_up, warm_start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(("task", "servers"), [("running-sums", "2"), ("guess-number", "1")])
def test_nothing_is_found_in_a_healthy_run(task: str, servers: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("--task", task, "--engine", "torch", "--servers", servers, "--steps", "60", warm_start(task))
    with running_up(run_dir, *arguments) as mesh:
        mesh.wait_for_steps(5)
        while_it_runs = run_command(["doctor", "--json", str(run_dir)], deadline_s=120.0)
        assert mesh.finish(240.0).code == 0
    assert (while_it_runs.code, json.loads(while_it_runs.out)) == (0, []), while_it_runs.err
    ended = run_command(["doctor", "--json", str(run_dir)])
    assert (ended.code, json.loads(ended.out)) == (0, []), ended.err
