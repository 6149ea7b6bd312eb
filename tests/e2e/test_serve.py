"""`rollmesh serve`, and the same plane by five commands, as the docs write them."""

from __future__ import annotations

import json
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import free_port, wait_for_port
from tests.support.mesh_command import COMMAND, Running, end_by, patience, run_command, running

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


def lines_until(mesh: Running, last: str) -> Iterator[str]:
    assert mesh.process.stdout is not None
    while True:
        line = mesh.process.stdout.readline()
        assert line, f"ended early:\n{mesh.logs()}"
        yield line.rstrip("\n")
        if last in line:
            return


def called(command: str, folder: Path | None = None) -> dict[str, Any]:
    """A command of a shell, which answers JSON; run in `folder`."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True, cwd=folder)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def assert_status_finds_it(mesh: Running, folder: Path) -> None:
    """Without an address, all of it, and a bus that hangs."""
    well = run_command(["status"], cwd=folder)
    assert (well.code, well.err) == (0, "")
    states = {line.split()[0]: line.split()[1] for line in well.out.splitlines() if " http://" in line}
    assert states == dict.fromkeys(("gateway", "s0", "weight-bus"), "ready")
    examined = run_command(["doctor"], cwd=folder)
    assert examined.code == 0, examined
    said = " ".join(examined.out.split())
    assert said.startswith("nothing is wrong, as far as can be seen, with the rollout plane in "), examined
    assert said.endswith(", which runs")
    bus = mesh.service("weight-bus")
    bus.suspend()
    try:
        hung = run_command(["status"], cwd=folder)
    finally:
        bus.resume()
    assert hung.code == 1 and "because: weight-bus takes connections and answers nothing" in hung.out


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(False, id="open"),
        pytest.param(True, id="keys, TLS and a Redis of the user's", marks=pytest.mark.slow),
    ],
)
def test_one_command_serves_a_model_and_prints_a_call_that_works(
    keys: bool, redis_url: str, tiny_policy: Path, tmp_path: Path
) -> None:
    command = ["serve", str(tiny_policy), "--servers", "2" if keys else "1", "--engine", "torch", "--port", "0"]
    if keys:
        assert run_command(["keys", "init", str(tmp_path / "keys")]).code == 0
        assert run_command(["keys", "tls", str(tmp_path / "tls")]).code == 0
        command += ["--keys-dir", str(tmp_path / "keys"), "--tls-dir", str(tmp_path / "tls" / "localhost")]
        command += ["--redis-url", redis_url]
    authority = tmp_path / "tls" / "localhost" / "ca.pem"
    trusted = ssl.create_default_context(cafile=authority) if keys else ssl.create_default_context()
    run_dir = tmp_path / "runs" / "plane"
    with running(run_dir, [*command, "--run-dir", str(run_dir)]) as mesh:
        said = list(lines_until(mesh, "Ctrl-C stops it"))
        (page,) = (line.removeprefix("dashboard: ") for line in said if line.startswith("dashboard: "))
        key = (tmp_path / "keys" / "agent.key").read_text().strip() if keys else "none"
        with httpx.Client(verify=trusted, timeout=30.0) as http:
            runs = http.get(f"{page}api/runs", headers={"authorization": f"Bearer {key}"})
            strangers = http.get(f"{page}api/runs")
        opened, answered = (called(line.removeprefix("try: ")) for line in said if line.startswith("try: "))
        if not keys:
            assert_status_finds_it(mesh, tmp_path)
        done = end_by(mesh, signal.SIGINT)
    servers = {"rollout-server-0", "rollout-server-1"} if keys else {"rollout-server-0"}
    assert {line.split()[0] for line in said if " is ready at http" in line} == {"weight-bus", "gateway", *servers}
    scheme = "https" if keys else "http"
    assert all(f" is ready at {scheme}://" in line for line in said if " is ready at " in line)
    assert page.startswith(f"{scheme}://")
    (status,) = (line for line in said if "rollmesh status" in line)
    assert not (run_dir / "redis-url").exists()
    assert (f"--redis-url {redis_url} " in status) is keys
    assert [run["live"] for run in runs.json()["runs"]] == [True]
    assert strangers.status_code == (401 if keys else 200)
    assert opened["session_id"] == "hello"
    assert answered["object"] == "text_completion"
    assert "everything has stopped" in done.out
    assert not (run_dir / "redis").exists()
    assert (run_dir / "logs" / "gateway.log").exists()
    agent = (tmp_path / "keys" / "agent.key").read_text().strip() if keys else "no key"
    assert agent not in "".join(said), "the shell reads it"


def test_a_port_in_use_is_found_before_anything_starts(tiny_policy: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run_command(["serve", str(tiny_policy), "--port", str(port), "--run-dir", str(tmp_path / "plane")])
    assert refused.code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in refused.err and "choose another port" in refused.err
    assert not (tmp_path / "plane").exists()


@pytest.mark.slow
def test_five_commands_are_the_same_plane(tiny_policy: Path, tmp_path: Path) -> None:
    """Each in its own terminal, as docs/serving.md has them, and the call behind them."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## By five commands")[2]
    shown = re.findall(r"^\$ rollmesh (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    assert [line.split()[0] for line in shown] == ["redis", "weight-bus", *["rollout-server"] * 2, "gateway"]
    ports = {port: free_port() for port in (6379, 8200, 8100, 8101, 8000)}

    def here(line: str) -> str:
        for port, ours in ports.items():
            line = re.sub(rf"\b{port}\b", str(ours), line)
        return line.replace("models/mine", str(tiny_policy)).replace("--data-dir redis", f"--data-dir {tmp_path}/redis")

    with ExitStack() as stack:
        for line, port in zip(shown, ports.values(), strict=True):
            log = stack.enter_context((tmp_path / f"{port}.log").open("wb"))
            process = subprocess.Popen([*COMMAND, *here(line).split()], stdout=log, stderr=log)
            stack.callback(process.wait, timeout=30)
            stack.callback(process.terminate)
            wait_for_port(port, process, 60.0 * patience())
        calls = re.findall(r"^\$ (curl .*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
        assert len(calls) == 9
        ends = time.monotonic() + 120.0 * patience()
        while subprocess.run(["bash", "-c", here(calls[0])], capture_output=True, check=False).returncode:
            assert time.monotonic() < ends, [log.read_text()[-1000:] for log in tmp_path.glob("*.log")]
            time.sleep(0.2)
        assert called(here(calls[1]))["session_id"] == "hello"
        for turn in calls[2:4]:
            assert called(here(turn), tmp_path)["object"] == "text_completion"
        gateway = f"http://127.0.0.1:{ports[8000]}"
        (whole,) = called(f"curl -s {gateway}/sessions/hello/trajectory")["segments"]
        assert whole["break_reason"] is None, "the second turn goes on from the first"
        opened, answered, seen, finished, kept = (called(here(call)) for call in calls[4:])
        assert (opened["session_id"], answered["object"]) == ("one", "text_completion")
        assert (seen["session_id"], finished["reward"]) == ("one", 1.0)
        assert [each["session_id"] for each in kept["trajectories"]] == ["one"]
