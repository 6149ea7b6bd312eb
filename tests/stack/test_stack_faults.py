"""A stack that is scaled, killed service by service, crashed and cut off goes on training, and its accounts balance."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.support.compose_stack import LASTING, Stack

pytestmark = [pytest.mark.stack, pytest.mark.alone]

ENDLESS = 100_000
LAST_STEPS = 25
RECOVERY_S = 60.0


def working(stack: Stack) -> set[str]:
    """Rollout servers that have work at the moment."""
    return {
        each["name"]
        for each in stack.status().get("services", [])
        if each["kind"] == "rollout-server" and (each["running"] or each["open_sessions"] or each["open_groups"])
    }


def trains_on(stack: Stack) -> None:
    """Steps are made that were not there before."""
    before = stack.steps()
    stack.wait("three more steps", lambda: stack.steps() >= before + 3, RECOVERY_S)


def end_soon(stack: Stack) -> int:
    """Have the run end a few steps from here: a trainer that comes back reads its settings anew. Returns at which step."""
    last = stack.steps() + LAST_STEPS
    stack.compose("exec", "-T", "environment", "sed", "-i", f"s/^steps = .*/steps = {last}/", "/runs/stack/config.toml")
    stack.crash("trainer")
    return last


def test_a_stack_is_scaled_killed_crashed_and_cut_off(stack: Stack) -> None:
    stack = dataclasses.replace(stack, settings={**stack.settings, "ROLLMESH_STEPS": str(ENDLESS)})
    stack.compose("up", "--detach")
    stack.wait_healthy(*LASTING, deadline_s=RECOVERY_S)

    stack.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", "rollout=3", "rollout")
    seen: set[str] = set()

    def all_have_had_work() -> bool:
        seen.update(working(stack))
        return len(seen) == 3

    # Looked for seldom: what a look takes of the cores, the new servers lack.
    stack.wait("three servers have had work", all_have_had_work, RECOVERY_S, every_s=1.0)

    for service in ("gateway", "weight-bus", "redis", "rollout", "trainer", "environment", "rewards", "prometheus"):
        stack.compose("kill", service)
        assert stack.state(service) != "healthy"
        scale = ("--scale", "rollout=3") if service == "rollout" else ()
        stack.compose("up", "--detach", "--no-deps", "--no-recreate", *scale, service)
        if service in LASTING:
            stack.wait_healthy(service, deadline_s=RECOVERY_S)
        trains_on(stack)

    for service in ("rollout", "weight-bus", "gateway"):
        stack.crash(service)
        stack.wait_healthy(service, deadline_s=RECOVERY_S)
        trains_on(stack)

    network, bus = f"{stack.project}_mesh", stack.container("weight-bus")
    stack.run(["docker", "network", "disconnect", network, bus], deadline_s=30.0)
    stack.wait("status misses the bus", lambda: misses_the_bus(stack), 20.0)
    stack.run(["docker", "network", "connect", "--alias", "weight-bus", network, bus], deadline_s=30.0)
    trains_on(stack)

    last = end_soon(stack)
    stack.wait("the run ends", lambda: ended(stack), 120.0)
    queue = stack.status()["queue"]
    assert queue["concluded"]
    assert queue["published"] == queue["trained"] + queue["dropped"]
    assert queue["in_stream"] == queue["open_groups"] == 0
    report = json.loads(stack.compose("exec", "-T", "gateway", "cat", "/runs/stack/trainer_report.json").stdout)
    assert report["final_version"] == last
    assert report["weights_digest_match"] is True
    stack.down()
    assert stack.left() == []


def misses_the_bus(stack: Stack) -> bool:
    causes = stack.status().get("causes", [])
    return any(cause["service"] == "weight-bus" for cause in causes)


def ended(stack: Stack) -> bool:
    states = {each["Service"]: each["State"] for each in stack.containers()}
    return states["trainer"] == states["environment"] == "exited"
