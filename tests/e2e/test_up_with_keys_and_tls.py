"""`rollmesh up --keys-dir --tls-dir`: the same mesh trains over TLS alone, with every door closed, and shows no key. Its
processes have GPUs of their own, of eight that are stated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import httpx
import psutil
import pytest
import redis

from services.run_store.client import with_password
from services.security.keys import key_file, make_keys
from services.security.permissions import KeyName
from services.security.tls import Trust
from tests.support.certificates import make_certificates
from tests.support.mesh_command import (
    Running,
    listening,
    processes_of_runs_in,
    run_command,
    running_up,
    summary_of,
    warm_start,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SERVING = {
    "weight-bus": "weight-bus",
    "rollout-server": "rollmesh rollout server",
    "gateway": "rollmesh gateway",
    "train": "trainer",
}
"""By its command, what each service calls itself."""
STEPS = 30


def test_a_mesh_with_keys_and_certificates_trains_and_lets_no_stranger_in(tmp_path: Path) -> None:
    run_dir, keys = tmp_path / "run", tmp_path / "keys"
    certificates = make_certificates(tmp_path)
    make_keys(keys)
    secrets = {name: key_file(keys, name).read_text().strip() for name in get_args(KeyName)}
    trust = certificates.mesh.trust
    folders = ["--keys-dir", str(keys), "--tls-dir", str(certificates.ours)]
    small = ["evaluation.problems=32", "rollout.groups_per_step=4", "placement.devices=8x80", warm_start()]
    with running_up(run_dir, "--engine", "torch", "--servers", "2", "--steps", str(STEPS), *folders, *small) as mesh:
        mesh.wait_for_steps(1)
        # Without the environment the trainer waits, and is there to answer until everything has been asked.
        environment = mesh.service("run-environment")
        environment.suspend()
        check_tls(mesh, trust)
        check_keys(mesh, trust, secrets)
        check_redis(mesh, secrets["redis"])
        check_status(mesh, folders)
        check_devices(mesh)
        shown = [
            word for process in [psutil.Process(mesh.process.pid), *mesh.descendants()] for word in process.cmdline()
        ]
        assert not [word for word in shown if any(secret in word for secret in secrets.values())]
        environment.resume()
        done = mesh.finish()
    assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    summary = summary_of(run_dir)
    assert summary["steps"] == summary["final_version"] == STEPS
    assert summary["weights_digest_match"] is True
    assert summary["commits"] > 0
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    leaked = [path for path in written for secret in secrets.values() if secret.encode() in path.read_bytes()]
    assert leaked == []
    assert processes_of_runs_in(run_dir) == []


def check_devices(mesh: Running) -> None:
    """Trainer and engines see GPUs of their own, services none, and the user's code what the user's shell does."""
    seen: dict[str, set[str]] = {}
    for process in mesh.descendants():
        variables = process.environ()
        if service := variables.get("ROLLMESH_SERVICE"):
            seen.setdefault(service, set()).add(variables.get("CUDA_VISIBLE_DEVICES", "all"))
    assert (seen["trainer"], seen["rollout-server-0"], seen["rollout-server-1"]) == ({"0"}, {"1"}, {"2"})
    assert seen["weight-bus"] == seen["gateway"] == {""}
    assert seen["environment"] == {os.environ.get("CUDA_VISIBLE_DEVICES", "all")}


def check_tls(mesh: Running, trust: Trust) -> None:
    """Each service answers over TLS, and on none of its ports in the clear."""
    for command, title in SERVING.items():
        ports = listening([mesh.service(command)])
        found = {port: probed(port, trust) for port in ports}
        assert title in found.values(), (command, found)
        assert not [port for port in ports if in_the_clear(port)], command


def check_keys(mesh: Running, trust: Trust, secrets: dict[str, str]) -> None:
    """The right key opens, none and a made-up one do not; another's does not open the trainer's figures."""
    (metrics,) = [
        f"https://127.0.0.1:{port}" for port in listening([mesh.service("train")]) if probed(port, trust) == "trainer"
    ]
    calls = [
        (address(mesh, "weight-bus"), "GET", "/v1/engines", "peer"),
        (address(mesh, "rollout-server"), "POST", "/resume", "peer"),
        (address(mesh, "rollout-server"), "GET", "/engine", "agent"),
        (address(mesh, "gateway"), "GET", "/trajectories", "agent"),
        (address(mesh, "gateway"), "GET", "/admin/servers", "admin"),
        (metrics, "GET", "/metrics", "peer"),
        (metrics, "GET", "/metrics", "metrics"),
        (address(mesh, "gateway"), "GET", "/metrics", "metrics"),
        (address(mesh, "weight-bus"), "GET", "/metrics", "metrics"),
        (address(mesh, "rollout-server"), "GET", "/metrics", "metrics"),
    ]
    with httpx.Client(verify=trust.verify, timeout=10.0) as http:
        for url, method, path, name in calls:
            for key, status in ((None, 401), ("x" * 43, 401), (secrets[name], 200)):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                assert http.request(method, url + path, headers=headers).status_code == status, path
        agent = {"authorization": f"Bearer {secrets['agent']}"}
        assert http.get(metrics + "/metrics", headers=agent).status_code == 401


def check_redis(mesh: Running, password: str) -> None:
    url = word_after(mesh, "rollout-server", "--redis-url")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(url).ping()
    with redis.Redis.from_url(with_password(url, password)) as signed_in:
        assert signed_in.ping()


def check_status(mesh: Running, folders: list[str]) -> None:
    """`rollmesh status` finds every service, ready, at an address of TLS."""
    done = run_command(["status", "--json", "--redis-url", word_after(mesh, "rollout-server", "--redis-url"), *folders])
    seen = {each["name"]: each for each in json.loads(done.out)["services"]}
    assert set(seen) == {"s0", "s1", "gateway", "weight-bus", "trainer"}, done.err
    for name, service in seen.items():
        assert service["url"].startswith("https://127.0.0.1:"), name
        assert service["probe"] == "ready", service


def address(mesh: Running, command: str) -> str:
    return f"https://127.0.0.1:{word_after(mesh, command, '--port')}"


def word_after(mesh: Running, command: str, flag: str) -> str:
    words: list[str] = mesh.service(command).cmdline()
    return words[words.index(flag) + 1]


def probed(port: int, trust: Trust) -> str | None:
    """What stands at a port, asked over TLS; None for what speaks something else, as a transport of weights does."""
    try:
        answer = httpx.get(f"https://127.0.0.1:{port}/version", verify=trust.verify, timeout=5.0)
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
