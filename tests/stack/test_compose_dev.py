"""deploy/compose.dev.yaml: a change of the source is there after `restart`, without a build; Prometheus has a port."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port
from tests.support.compose_stack import LASTING, ROOT, Stack

pytestmark = pytest.mark.stack

COMPOSE = ["docker", "compose", "-f", "deploy/compose.yaml", "-f", "deploy/compose.dev.yaml"]


def test_a_changed_source_is_served_after_a_restart(images: None, tmp_path: Path) -> None:
    clone = tmp_path / "rollmesh"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    prometheus = free_port()
    settings = {"ROLLMESH_KEYS": str(tmp_path / "keys"), "ROLLMESH_PROMETHEUS_PORT": str(prometheus)}
    stack = Stack(f"rollmesh-dev-{uuid.uuid4().hex[:8]}", settings, clone)

    def alive() -> dict[str, str]:
        said: dict[str, str] = httpx.get(f"http://127.0.0.1:{stack.port}/livez", timeout=10.0).json()
        return said

    try:
        stack.compose("run", "--rm", "keys")
        stack.run([*COMPOSE, "up", "--detach"], deadline_s=120.0)
        stack.wait_healthy(*LASTING, deadline_s=60.0)
        assert alive() == {"status": "alive"}
        assert httpx.get(f"http://127.0.0.1:{prometheus}/-/ready", timeout=10.0).status_code == 200
        source = clone / "services" / "http" / "app.py"
        source.write_text(source.read_text(encoding="utf-8").replace('"alive"', '"changed"'), encoding="utf-8")
        stack.run([*COMPOSE, "restart", "gateway"], deadline_s=60.0)
        stack.wait_healthy("gateway", deadline_s=60.0)
        assert alive() == {"status": "changed"}
    finally:
        stack.down()
