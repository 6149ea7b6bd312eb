"""`rollmesh up` with traces and JSON logs: an episode can be followed from the runner to the commit that it led to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.mesh_command import Running, running_up, summary_of, url_of, warm_start
from tests.support.trace_receiver import TakenSpan, TraceReceiver, receiving_traces
from trainer.metrics.files import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, K = 8, 2
GIVEN_UP, CALLER = "s-given-up", "00-11112222333344445555666677778888-aaaabbbbccccdddd-01"
SERVERS = {"s0", "s1"}


def give_a_session_up(mesh: Running) -> None:
    with httpx.Client(base_url=url_of(mesh.service("rollout-server")), timeout=20.0) as server:
        body = {"session_id": GIVEN_UP, "purpose": "evaluate"}
        server.post("/sessions", json=body, headers={"traceparent": CALLER}).raise_for_status()
        server.post(f"/sessions/{GIVEN_UP}/abort", headers={"traceparent": CALLER}).raise_for_status()


def test_an_episode_leads_to_a_step_and_to_the_commits_that_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_LOG_JSON", "1")
    run_dir = tmp_path / "run"
    with receiving_traces() as receiver:
        small = ["evaluation.problems=32", "rollout.groups_per_step=4", f"k={K}", warm_start()]
        traces = ["telemetry.traces=otlp", f"telemetry.traces_endpoint={receiver.endpoint}"]
        with running_up(run_dir, "--engine", "torch", "--servers", "2", "--steps", str(STEPS), *small, *traces) as mesh:
            mesh.wait_for_steps(1, 240.0)
            give_a_session_up(mesh)
            done = mesh.finish()
    assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"

    steps = {span.facts["rollmesh.version"]: span for span in receiver.spans("trainer.step")}
    assert sorted(steps) == list(range(1, STEPS + 1))
    summary = summary_of(run_dir)
    assert sum(step.facts["rollmesh.trajectories"] for step in steps.values()) == summary["trajectories_trained"]
    assert {span.run for span in receiver.spans()} == {summary["run_id"]}
    left_out = {line.version: line.masked_tokens for line in read_metrics(run_dir / "metrics.jsonl")}
    for version, step in steps.items():
        assert len(step.links) == step.facts["rollmesh.groups"] == 4
        over = sum(check_way_from_the_runner(receiver, link, version) for link in step.links)
        assert over <= left_out[version]
        check_way_to_the_engines(receiver, step, version)
    check_logs(run_dir, summary["run_id"], {span.trace for span in receiver.spans()})


def check_way_from_the_runner(receiver: TraceReceiver, link: tuple[str, str], version: int) -> int:
    """From the group's first call in the runner's process to the tokens that the step of `version` took.

    Returns how many of them were over K for certain: a group that others overtook may be, and then its tokens are no part
    of the loss.
    """
    trace = receiver.trace(link[0])
    (opened,) = [span for span in trace if span.span == link[1]]
    assert (opened.service, opened.name) == ("rollmesh-rollout-server", "POST /groups")
    assert [(span.service, span.name) for span in receiver.way_up(opened)] == [
        ("rollmesh-gateway", "POST /groups"),
        ("rollmesh-environment", "environment.group"),
    ]
    sampled = [span for span in trace if span.name == "rollout.generate"]
    assert sum(span.facts["rollmesh.samples"] for span in sampled) == 8
    assert all(span.facts["rollmesh.version"] < version for span in sampled)
    for span in sampled:
        assert span.facts["rollmesh.tokens"] > 0 and span.instance in SERVERS
        above = receiver.way_up(span)
        assert [each.service for each in above] == [
            "rollmesh-rollout-server",
            "rollmesh-gateway",
            "rollmesh-environment",
        ]
        assert above[0].name == "POST /groups/{group_id}/turns"
        assert above[-1].facts["rollmesh.group"] == span.facts["rollmesh.group"]
        # One clock: what is below lies within what is above.
        assert all(each.start <= span.start and span.end <= each.end for each in above)
    late = [span for span in sampled if version - 1 - span.facts["rollmesh.version"] > K]
    return sum(span.facts["rollmesh.tokens"] for span in late)


def check_way_to_the_engines(receiver: TraceReceiver, step: TakenSpan, version: int) -> None:
    """From the step's batch to the flip of each server, or to the update that overtook it."""
    trace = receiver.trace(step.trace)
    assert [span.name for span in receiver.way_up(step)] == ["trainer.batch"]
    (update,) = [span for span in trace if span.name == "trainer.update"]
    assert update.facts["rollmesh.version"] == version
    commits = [span for span in trace if span.name == "rollout.commit"]
    assert {span.facts["rollmesh.version"] for span in commits} <= {version}
    if update.facts["rollmesh.state"] == "committed":
        assert {span.instance for span in commits} == SERVERS
    else:
        assert update.facts["rollmesh.state"] == "superseded" and version < STEPS
    for commit in commits:
        assert [(span.service, span.name) for span in receiver.way_up(commit)] == [
            ("rollmesh-rollout-server", "POST /weights/commit"),
            ("rollmesh-weight-bus", "bus.commit"),
            ("rollmesh-weight-bus", "POST /v1/updates"),
            ("rollmesh-trainer", "trainer.update"),
            ("rollmesh-trainer", "trainer.batch"),
        ]
        assert commit.start >= step.end


def check_logs(run_dir: Path, run_id: str, traces: set[str]) -> None:
    lines: dict[str, list[dict[str, Any]]] = {}
    for log in (run_dir / "logs").glob("*.log"):
        if log.stem != "valkey":
            lines[log.stem] = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert lines.keys() >= {"environment", "gateway", "rollout-server-0", "rollout-server-1", "trainer", "weight-bus"}
    for service, said in lines.items():
        for line in said:
            assert (line["service"], line["run"]) == (service, run_id), line
            assert line["event"] and line["level"] and line["timestamp"]
    updates = [line for line in lines["weight-bus"] if line["event"] == "weight update" and line["version"] > 0]
    commits = [line for line in lines["rollout-server-0"] if line["event"] == "commit" and line["version"] > 0]
    assert updates and commits
    assert all(line["trace_id"] in traces for line in [*updates, *commits])
    (given_up,) = [
        line
        for service in lines
        for line in lines[service]
        if line["event"] == "session given up" and "rollout" in service
    ]
    assert given_up["session"] == GIVEN_UP and given_up["version"] >= 0
    assert given_up["trace_id"] == CALLER.split("-")[1]
