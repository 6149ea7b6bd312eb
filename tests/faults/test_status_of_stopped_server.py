"""No silent wait: a rollout server is stopped in its tracks, and `rollmesh status` names it while the trainer waits."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.mesh_command import Running, run_command, running_up, url_of, warm_start

pytestmark = pytest.mark.e2e
NAMED_WITHIN_S = 10.0


def of_the_run(mesh: Running) -> list[str]:
    words = mesh.service("train").cmdline()
    return [part for flag in ("--run-id", "--redis-url") for part in (flag, words[words.index(flag) + 1])]


def server(mesh: Running, name: str) -> psutil.Process:
    return next(each for each in mesh.descendants() if "rollout-server" in (words := each.cmdline()) and name in words)


def open_group(server: psutil.Process) -> None:
    """Open a group that nobody plays: whatever the run's own groups do, this server holds one."""
    opening = {"task": "guess-number", "group_size": 2, "sampling": {"max_tokens": 4}, "wait_s": 20.0}
    httpx.post(f"{url_of(server)}/groups", json=opening, timeout=30.0).raise_for_status()


def status(mesh: Running) -> tuple[int, dict[str, Any], float]:
    """Exit code, what was printed, and how long it took."""
    done = run_command(["status", "--json", *of_the_run(mesh)], deadline_s=NAMED_WITHIN_S)
    assert done.out, done.err
    return done.code, json.loads(done.out), done.seconds


def test_status_names_the_server_that_stands_still_and_what_it_holds(
    tmp_path: Path,
) -> None:
    # Without a gateway nobody takes the stopped server's calls elsewhere, and with a barrier no update passes it by.
    settings = ["gateway.enabled=never", "rollout.groups_per_step=4", "evaluation.problems=32"]
    settings += [warm_start("guess-number")]
    arguments = ["--task", "guess-number", "--servers", "2", "--engine", "torch", "--k", "1", "--steps", "400"]
    with running_up(tmp_path / "runs" / "it", *arguments, *settings) as mesh:
        mesh.wait_for_steps(4)
        code, report, _ = status(mesh)
        assert code == 0, report
        # It looks at its own steps once a second, and tells of them after that.
        tells_by = time.monotonic() + 20.0
        while report["trainer"] is None or report["trainer"]["step"] < 4:
            assert time.monotonic() < tells_by, "the trainer's report stays behind its steps"
            code, report, _ = status(mesh)
            assert code == 0, report
        assert {each["name"]: each["probe"] for each in report["services"]} == dict.fromkeys(
            ("s0", "s1", "trainer", "weight-bus"), "ready"
        )
        assert 0.0 < report["trainer"]["busy_share"] <= 1.0
        assert report["queue"]["trained"] > 0
        found = run_command(["status", "--json"], cwd=tmp_path)
        assert json.loads(found.out)["run_id"] == report["run_id"], "the run in ./runs is found"
        found = run_command(["dead-letters"], cwd=tmp_path)
        assert found.code == 0 and "published" in found.out, found.err

        stopped = server(mesh, "s1")
        open_group(stopped)
        stopped.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        try:
            code, report, took_s = status(mesh)
            named_after_s = time.monotonic() - began
            assert code == 1
            assert [(cause["service"], cause["kind"], cause["sure"]) for cause in report["causes"]] == [
                ("s1", "silent", True)
            ]
            assert named_after_s < NAMED_WITHIN_S, took_s
            held = report["causes"][0]["groups"]
            assert held
            assert {group["server"] for group in held} == {"s1"}

            waits_by = time.monotonic() + 20.0
            while report["trainer_waits"] is None:
                assert time.monotonic() < waits_by, "the trainer goes on without the stopped server"
                code, report, _ = status(mesh)
            assert report["causes"][0]["service"] == "s1", "also once its lease has run out"
            assert report["trainer_waits"]["waiting_for"].startswith("the batch of step")
        finally:
            stopped.send_signal(signal.SIGCONT)
