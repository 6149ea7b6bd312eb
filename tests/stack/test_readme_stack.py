"""The README's section on the stack, line by line, on a clean clone: it trains, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import uuid
from pathlib import Path

import httpx
import pytest

from tests.support.compose_stack import BUILD_DEADLINE_S, LASTING, ROOT, Stack

pytestmark = [pytest.mark.stack, pytest.mark.alone]

STEPS = 60
"""As many as `up` makes by itself: after half of them, on a busy machine, it has sometimes learned little yet."""


def documented() -> list[list[str]]:
    """The commands of the section, one a line."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## The stack\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]


def test_a_new_user_brings_the_stack_up_from_a_clean_clone(images: None, tmp_path: Path) -> None:
    clone = tmp_path / "rollmesh"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    # The settings of a user's .env: a port that is free here, and a short run.
    stack = Stack(f"rollmesh-readme-{uuid.uuid4().hex[:8]}", {"ROLLMESH_STEPS": str(STEPS)}, clone)
    keys, up, scale, follow, status, copy, down = documented()
    try:
        stack.run(keys, deadline_s=BUILD_DEADLINE_S)
        # Built before, so that what is timed is the start.
        stack.compose("build", deadline_s=BUILD_DEADLINE_S)
        stack.run(up, deadline_s=120.0)
        healthy_after = stack.wait_healthy(*LASTING, deadline_s=60.0)
        assert healthy_after <= 60.0
        stack.run(scale, deadline_s=60.0)
        only_gateway_and_dashboard_listen(stack, clone)
        stack.run(follow, deadline_s=240.0)
        stack.wait("the environment ends", lambda: "exited" in stack.state("environment"), 60.0)
        said = json.loads(stack.run([*status, "--json"], deadline_s=60.0).stdout)
        assert said["queue"]["concluded"]
        assert said["queue"]["published"] == said["queue"]["trained"] + said["queue"]["dropped"]
        assert "run stack" in stack.run(status, deadline_s=60.0).stdout
        stack.run(copy, deadline_s=60.0)
        evaluation = json.loads((clone / "my-run" / "evaluation.json").read_text(encoding="utf-8"))
        assert evaluation["success_after"] > evaluation["success_before"] + 0.25
        assert len((clone / "my-run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == STEPS
        stack.wait("Prometheus scrapes every service", lambda: prometheus_sees_all(stack), 30.0)
        stack.run(down, deadline_s=90.0)
        assert stack.left() == []
    finally:
        stack.down()


def only_gateway_and_dashboard_listen(stack: Stack, clone: Path) -> None:
    """On loopback, and for those who have a key."""
    published = [port for each in stack.containers() for port in each["Publishers"] or [] if port["PublishedPort"]]
    places = {(port["URL"], port["PublishedPort"]) for port in published}
    assert places == {("127.0.0.1", stack.port), ("127.0.0.1", stack.dashboard_port)}
    agent = (clone / "deploy" / "keys" / "agent.key").read_text(encoding="ascii").strip()
    for port, path in ((stack.port, "run"), (stack.dashboard_port, "api/runs")):
        url = f"http://127.0.0.1:{port}/{path}"
        assert httpx.get(url, timeout=10.0).status_code == 401
        assert httpx.get(url, headers={"authorization": f"Bearer {agent}"}, timeout=10.0).status_code == 200


def prometheus_sees_all(stack: Stack) -> bool:
    """Whether every service that still runs is scraped, each rollout server too."""
    program = "import urllib.request as u; print(u.urlopen('http://prometheus:9090/api/v1/targets').read().decode())"
    said = stack.compose("exec", "-T", "gateway", "python3", "-c", program).stdout
    targets = json.loads(said)["data"]["activeTargets"]
    up = [target["labels"]["instance"] for target in targets if target["health"] == "up"]
    servers = sum(target["labels"]["job"] == "rollmesh-rollout" and target["health"] == "up" for target in targets)
    return {"gateway:8000", "weight-bus:8200", "rewards:8300"} <= set(up) and servers == 3
