"""`rollmesh up --keys-dir`: the same mesh trains with every door closed, and no key stands where others can read it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import httpx
import psutil
import pytest
import redis

from services.key_files import key_file, make_keys
from services.key_rules import KeyName
from services.redis_client import with_password
from tests.support.mesh_command import Running, listening, processes_of_runs_in, running_up, summary_of, warm_starts

pytestmark = pytest.mark.e2e


def address(mesh: Running, service: str) -> str:
    words = mesh.service(service).cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


def speaks_http(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_mesh_with_keys_trains_and_lets_no_stranger_in(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir, keys_dir = tmp_path / "run", tmp_path / "keys"
    make_keys(keys_dir)
    secrets = {name: key_file(keys_dir, name).read_text().strip() for name in get_args(KeyName)}
    small = [
        "evaluation.problems=32",
        "rollout.groups_per_step=4",
        f"warm_start.cache_dir={warm_starts(tmp_path_factory)}",
    ]
    arguments = ["--engine", "torch", "--servers", "2", "--steps", "12", "--keys-dir", str(keys_dir), *small]
    with running_up(run_dir, *arguments) as mesh:
        mesh.wait_for_steps(1)
        calls = [
            (address(mesh, "weight-bus"), "GET", "/v1/engines", "peer"),
            (address(mesh, "rollout-server"), "POST", "/resume", "peer"),
            (address(mesh, "rollout-server"), "GET", "/engine", "agent"),
            (address(mesh, "gateway"), "GET", "/trajectories", "agent"),
            (address(mesh, "gateway"), "GET", "/admin/servers", "admin"),
        ]
        for url, method, path, name in calls:
            for shown, status in ((None, 401), ("x" * 43, 401), (secrets[name], 200)):
                headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
                assert httpx.request(method, url + path, headers=headers, timeout=10.0).status_code == status, path
        metrics_of_the_trainer = [
            f"http://127.0.0.1:{port}/metrics"
            for port in listening([mesh.service("train")])
            if speaks_http(f"http://127.0.0.1:{port}/livez")
        ]
        assert len(metrics_of_the_trainer) == 1
        for name, status in (("agent", 401), ("peer", 200)):
            headers = {"authorization": f"Bearer {secrets[name]}"}
            assert httpx.get(metrics_of_the_trainer[0], headers=headers).status_code == status
        words = mesh.service("rollout-server").cmdline()
        redis_url = words[words.index("--redis-url") + 1]
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(redis_url).ping()
        with redis.Redis.from_url(with_password(redis_url, secrets["redis"])) as signed_in:
            assert signed_in.ping()
        shown = [
            word for process in [psutil.Process(mesh.process.pid), *mesh.descendants()] for word in process.cmdline()
        ]
        assert not [word for word in shown if any(secret in word for secret in secrets.values())]
        done = mesh.finish()
    assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    summary = summary_of(run_dir)
    assert summary["steps"] == summary["final_version"] == 12
    assert summary["weights_digest_match"] is True
    assert summary["commits"] > 0
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    leaked = [path for path in written for secret in secrets.values() if secret.encode() in path.read_bytes()]
    assert leaked == []
    assert processes_of_runs_in(run_dir) == []
