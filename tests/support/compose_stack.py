"""The stack as a user runs it: `docker compose` on deploy/compose.yaml, watched from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
BUILD_DEADLINE_S = 1200.0
ONCE = ("prepare", "warm-start")
"""Services that do their work and end."""
LASTING = ("redis", "weight-bus", "rollout", "gateway", "rewards", "trainer", "prometheus")
"""Services that have a health check."""


def no_engine() -> str | None:
    """Why no stack can be brought up here, in one line; None where one can."""
    if shutil.which("docker") is None:
        return "no docker command here"
    asked = subprocess.run(
        ["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True, check=False
    )
    if asked.returncode or not asked.stdout.strip():
        why = asked.stderr.strip().splitlines() or ["no answer"]
        return f"no Docker engine answers ({why[-1]})"
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return "docker has no compose plug-in" if plugin.returncode else None


def build_environ() -> dict[str, str]:
    """Images are built from where this machine's own packages come from."""
    found = {}
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        if Path(folder).is_dir():
            found["ROLLMESH_WHEELS"] = folder
            break
    bundle = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if bundle and Path(bundle).is_file():
        found["ROLLMESH_CA_BUNDLE"] = bundle
    if index := os.environ.get("PIP_INDEX_URL"):
        found["ROLLMESH_INDEX_URL"] = index
    return found


@dataclass
class Stack:
    """One compose project. `settings`: variables of deploy/compose.yaml."""

    project: str
    settings: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT
    port: int = field(default_factory=free_port)
    dashboard_port: int = field(default_factory=free_port)

    def environ(self) -> dict[str, str]:
        ports = {"ROLLMESH_PORT": str(self.port), "ROLLMESH_DASHBOARD_PORT": str(self.dashboard_port)}
        own = {"COMPOSE_PROJECT_NAME": self.project, "COMPOSE_ANSI": "never"}
        return {**os.environ, **build_environ(), **own, **ports, **self.settings}

    def compose(self, *words: str, deadline_s: float = 180.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`docker compose -f deploy/compose.yaml WORDS`."""
        return self.run(["docker", "compose", "-f", "deploy/compose.yaml", *words], deadline_s=deadline_s, check=check)

    def run(self, command: list[str], *, deadline_s: float, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def containers(self) -> list[dict[str, Any]]:
        """As `docker compose ps` tells of them, ended ones too."""
        lines = self.compose("ps", "--all", "--format", "json").stdout.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def state(self, service: str) -> str:
        """`healthy`, or what keeps the service from it: all its replicas must be."""
        states = [each["Health"] or each["State"] for each in self.containers() if each["Service"] == service]
        bad = [state for state in states if state != "healthy"]
        return "healthy" if states and not bad else ", ".join(bad) or "absent"

    def status(self) -> dict[str, Any]:
        """`rollmesh status --json`, asked in a container."""
        said = self.compose("exec", "-T", "gateway", "rollmesh", "status", "--json", check=False)
        found: dict[str, Any] = json.loads(said.stdout) if said.stdout.startswith("{") else {}
        return found

    def steps(self) -> int:
        """Optimizer steps made so far."""
        lines = self.compose(
            "exec", "-T", "gateway", "sh", "-c", "wc -l </runs/stack/metrics.jsonl", check=False
        ).stdout
        return int(lines) if lines.strip().isdigit() else 0

    def wait(self, what: str, holds: Callable[[], bool], deadline_s: float, *, every_s: float = 0.25) -> float:
        """Until `holds`; returns the seconds that it took. Fails with the containers' last words.

        `every_s`: between two looks, the last of which begins no later than the deadline.
        """
        began = time.monotonic()
        while not holds():
            passed = time.monotonic() - began
            assert passed < deadline_s, f"not within {deadline_s:g} s: {what}\n{self.last_words()}"
            time.sleep(min(every_s, deadline_s - passed))
        return time.monotonic() - began

    def wait_healthy(self, *services: str, deadline_s: float) -> float:
        waited = time.monotonic()
        for service in services:
            left = deadline_s - (time.monotonic() - waited)
            self.wait(f"{service} is healthy", lambda name=service: self.state(name) == "healthy", max(left, 0.1))
        return time.monotonic() - waited

    def last_words(self) -> str:
        states = "\n".join(f"{each['Service']} {each['State']} {each['Health']}" for each in self.containers())
        return f"{states}\n{self.compose('logs', '--tail', '15', '--no-color', check=False).stdout[-12000:]}"

    def container(self, service: str) -> str:
        """The id of the first replica."""
        return self.compose("ps", "--quiet", service).stdout.split()[0]

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run(["docker", "inspect", container], deadline_s=30.0).stdout)[0]
        return found

    def crash(self, service: str) -> None:
        """kill -9 of the process in the container, which the engine knows nothing of: its restart policy is asked."""
        os.kill(self.inspect(self.container(service))["State"]["Pid"], signal.SIGKILL)

    def down(self) -> None:
        self.compose("--profile", "keys", "down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

    def left(self) -> list[str]:
        """Containers, volumes and networks of the project."""
        mine = ["--filter", f"label=com.docker.compose.project={self.project}", "--quiet"]
        kinds = (["docker", "ps", "--all"], ["docker", "volume", "ls"], ["docker", "network", "ls"])
        return [name for kind in kinds for name in self.run([*kind, *mine], deadline_s=30.0).stdout.split()]
