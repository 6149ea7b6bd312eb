"""`rollmesh up --tls-dir`: the same mesh trains with every service on TLS, and none of them speaks anything else."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
import pytest

from services.key_files import make_keys
from tests.support.certificates import make_certificates
from tests.support.mesh_command import (
    Running,
    listening,
    processes_of_runs_in,
    run_command,
    running_up,
    summary_of,
    warm_starts,
)

pytestmark = pytest.mark.e2e

SERVING = {
    "weight-bus": "weight-bus",
    "rollout-server": "rollmesh rollout server",
    "gateway": "rollmesh gateway",
    "train": "trainer",
}
"""By its command, what each service calls itself."""


def test_a_mesh_with_certificates_trains_over_tls_alone(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys"
    certificates = make_certificates(tmp_path)
    make_keys(keys)
    small = [
        "evaluation.problems=32",
        "rollout.groups_per_step=4",
        f"warm_start.cache_dir={warm_starts(tmp_path_factory)}",
    ]
    folders = ["--keys-dir", str(keys), "--tls-dir", str(certificates.ours)]
    with running_up(run_dir, "--engine", "torch", "--servers", "2", "--steps", "30", *folders, *small) as mesh:
        mesh.wait_for_steps(1)
        trust = certificates.mesh.trust
        for command, title in SERVING.items():
            service = mesh.service(command)
            found = {port: probed(port, trust.verify) for port in listening([service])}
            assert title in found.values(), (command, found)
            assert not [port for port in found if in_the_clear(port)], command
        redis_url = word_after(mesh, "--redis-url")
        looked = ["status", "--json", "--redis-url", redis_url, *folders]
        done = run_command(looked)
        seen = {each["name"]: each for each in json.loads(done.out)["services"]}
        assert set(seen) == {"s0", "s1", "gateway", "weight-bus", "trainer"}, done.err
        for name, service in seen.items():
            assert service["url"].startswith("https://127.0.0.1:"), name
            assert service["probe"] == "ready", service
        done = mesh.finish()
    assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    summary = summary_of(run_dir)
    assert summary["steps"] == summary["final_version"] == 30
    assert summary["weights_digest_match"] is True
    assert processes_of_runs_in(run_dir) == []


def word_after(mesh: Running, flag: str) -> str:
    words: list[str] = psutil.Process(mesh.service("rollout-server").pid).cmdline()
    return words[words.index(flag) + 1]


def probed(port: int, verify: object) -> str | None:
    """What stands at a port, asked over TLS; None for what speaks something else, as a transport of weights does."""
    try:
        answer = httpx.get(f"https://127.0.0.1:{port}/version", verify=verify, timeout=5.0)  # type: ignore[arg-type]
        return str(answer.json()["service"])
    except (httpx.HTTPError, ValueError):
        return None


def in_the_clear(port: int) -> bool:
    """Whether plain HTTP is answered."""
    try:
        httpx.get(f"http://127.0.0.1:{port}/livez", timeout=5.0)
    except httpx.HTTPError:
        return False
    return True
