"""K means K in a live run of two servers and the other built-in task: one of them stands still for many steps, and comes
back with what it held."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.mesh_command import (
    Running,
    patience,
    processes_of_runs_in,
    running_up,
    summary_of,
    url_of,
    warm_start,
)

pytestmark = pytest.mark.e2e
STEPS, K = 40, 1


def rollout_servers(mesh: Running) -> list[psutil.Process]:
    return [process for process in mesh.descendants() if "rollout-server" in process.cmdline()]


def client_of(service: psutil.Process) -> httpx.Client:
    return httpx.Client(base_url=url_of(service), timeout=30.0)


class HeldGroup:
    """A group that the test plays itself, opened at one server: so this one holds tokens when it is stopped, wherever the
    run's own groups are at that moment. Later calls go through the gateway, for another server may have taken it over."""

    def __init__(self, mesh: Running, server: psutil.Process) -> None:
        self._server, self._gateway = client_of(server), client_of(mesh.service("gateway"))
        opening = {"task": "guess-number", "group_size": 2, "sampling": {"max_tokens": 4}, "wait_s": 20.0}
        opened = asked(self._server, "/groups", opening)
        self._path, self._sessions = f"/groups/{opened['group_id']}", opened["session_ids"]
        self.first_version = self.speak("kqz:")

    def speak(self, text: str) -> int:
        """A turn in every session; the newest version that a token of them was sampled under."""
        turns = [{"session_id": session, "text": text} for session in self._sessions]
        answer = asked(self._gateway, f"{self._path}/turns", {"turns": turns})
        return max(int(turn["policy_version"]) for turn in answer["results"])

    def go_on(self, version: int) -> None:
        """Play it to its end once its server has come to `version`."""
        ends = time.monotonic() + patience() * 30.0
        while (reached := self._server.get("/engine").raise_for_status().json()["policy_version"]) < version:
            assert time.monotonic() < ends, f"the server stays at version {reached}, {version} is waited for"
            time.sleep(0.02)
        assert self.speak("H") >= version
        rewards = [{"session_id": session, "reward": float(place)} for place, session in enumerate(self._sessions)]
        asked(self._gateway, f"{self._path}/finish", {"rewards": rewards})
        self._server.close()
        self._gateway.close()


def asked(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answered = http.post(path, json=body)
    assert answered.is_success, answered.text
    answer: dict[str, Any] = answered.json()
    return answer


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
        held = HeldGroup(mesh, stopped)
        stopped.send_signal(signal.SIGSTOP)
        mesh.wait_for_steps(mesh.steps() + 4 * (K + 1))
        stopped.send_signal(signal.SIGCONT)
        held.go_on(held.first_version + K + 1)
        done = mesh.finish(90.0)
        assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    summary = summary_of(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == len(lines) == STEPS
    assert max(line["staleness_max"] for line in lines) <= K
    assert {int(age) for line in lines for age in line["staleness_histogram"]} <= {*range(K + 1)}
    masked = sum(line["masked_tokens"] for line in lines)
    assert masked + summary["trajectories_dropped"] > 0, "what was sampled before the stop is over K after it"
    assert summary["masked_fraction"] < 0.5
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]
    assert summary["weights_digest_match"] is True
    # With four groups a step, all rewards of each group may be equal by chance, and the policy sure of itself.
    assert set(summary["warnings"]) <= {"no_signal", "entropy"}
    assert STEPS // 2 <= summary["commits"] <= 2 * STEPS, "one on each server for a version, at most"
    # One address in front of both, and the environment knew no other.
    address = re.search(r"gateway is ready at (http://\S+)", done.out)
    assert address is not None, done.out
    assert f"urls=['{address[1]}']" in (run_dir / "logs" / "environment.log").read_text()
    assert processes_of_runs_in(run_dir) == []
