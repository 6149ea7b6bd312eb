"""`rollmesh up` as a user runs it: a command, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from services.host.files import shm_directory, shm_prefix
from tests.support.suite import locked, shared_folder

STOPPED_WITHIN_S = 15.0
COMMAND = (sys.executable, "-P", "-m", "services")


def patience() -> float:
    """What deadlines here are multiplied with: ROLLMESH_TEST_PATIENCE, for a machine that has much else to do."""
    return float(os.environ.get("ROLLMESH_TEST_PATIENCE", "1"))


@dataclass
class Finished:
    """How a command ended: exit code, both outputs, seconds."""

    code: int
    out: str
    err: str
    seconds: float


def run_command(arguments: Sequence[str], *, cwd: Path | None = None, deadline_s: float = 60.0) -> Finished:
    """Run any rollmesh command to its end."""
    began = time.monotonic()
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=patience() * deadline_s, cwd=cwd, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@dataclass
class Running:
    """A mesh that runs in the background."""

    process: subprocess.Popen[str]
    run_dir: Path

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def service(self, command: str) -> psutil.Process:
        """The process of one of our commands, such as `train`, of a module of ours, or Valkey's."""
        for process in self.descendants():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue  # it ended a moment ago
            if ("-m" in words and command in words) or command in process.name():
                return process
        raise AssertionError(f"no process runs {command!r}")

    def run_id(self) -> str:
        """As the weight bus was told it."""
        words = self.service("weight-bus").cmdline()
        return words[words.index("--run-id") + 1]

    def steps(self) -> int:
        """Optimizer steps made so far."""
        metrics = self.run_dir / "metrics.jsonl"
        return len(metrics.read_text(encoding="utf-8").splitlines()) if metrics.exists() else 0

    def wait_for_steps(self, count: int, deadline_s: float = 90.0) -> None:
        ends = time.monotonic() + patience() * deadline_s
        while self.steps() < count:
            assert self.process.poll() is None, f"ended early:\n{self.output()}"
            assert time.monotonic() < ends, f"no {count} steps within {deadline_s} s:\n{self.logs()}"
            time.sleep(0.02)

    def finish(self, deadline_s: float = 120.0) -> Finished:
        began = time.monotonic()
        out, err = self.process.communicate(timeout=patience() * deadline_s)
        return Finished(self.process.returncode, out, err, time.monotonic() - began)

    def output(self) -> str:
        return "".join(self.process.communicate(timeout=10.0))

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in (self.run_dir / "logs").glob("*.log"))


@contextmanager
def running_up(run_dir: Path, *arguments: str) -> Iterator[Running]:
    """Start `rollmesh up` in the background; whatever still runs at the end is killed."""
    with running(run_dir, ["up", "--plain", "--run-dir", str(run_dir), *arguments]) as mesh:
        yield mesh


@contextmanager
def running(run_dir: Path, command: Sequence[str]) -> Iterator[Running]:
    """Start a mesh by any command of rollmesh."""
    process = subprocess.Popen(
        [*COMMAND, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Running(process, run_dir)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def warm_start(task: str = "running-sums") -> str:
    """The setting by which `rollmesh up` finds the task's warm start, which is learnt once for all tests and workers."""
    cache = shared_folder() / "warm-starts"
    setting = f"warm_start.cache_dir={cache}"
    with locked(f"warm-start-{task}"):
        learnt = cache / f"{task}.learnt"
        if not learnt.exists():
            with TemporaryDirectory(prefix="rollmesh-warm-start-") as folder:
                done = run_command(["prepare", "--run-dir", f"{folder}/run", f"task={task}", setting], deadline_s=240.0)
            assert done.code == 0, done.err
            learnt.touch()
    return setting


def url_of(service: psutil.Process) -> str:
    """Where a service of a mesh answers, by its command line."""
    words = service.cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary


def end_by(mesh: Running, which: signal.Signals) -> Finished:
    """End a mesh by a signal to its supervisor: in time nothing of it is left, no process, port or shared memory."""
    started, run_id = mesh.descendants(), mesh.run_id()
    ports = listening(started)
    assert ports, "at least Valkey listens"
    began = time.monotonic()
    mesh.process.send_signal(which)
    done = mesh.finish(180.0)
    assert done.code == (-which if which == signal.SIGKILL else 128 + which), done.err
    assert left_behind(started) == []
    assert time.monotonic() - began < patience() * STOPPED_WITHIN_S
    assert "Traceback" not in done.err
    assert shared_memory_files(run_id) == []
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                # Free since the run ended, it may be another test's by now.
                others = who_listens(port)
                assert others, f"somebody still listens on {port}"
                assert not any(run_id in words or str(mesh.run_dir) in words for words in others), others
    return done


def listening(processes: Sequence[psutil.Process]) -> set[int]:
    """Ports that these processes listen on."""
    ports = set()
    for process in processes:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports.add(connection.laddr.port)
    return ports


def who_listens(port: int) -> list[str]:
    """Command lines of all processes that listen on a port of loopback."""
    found = []
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(" ".join(psutil.Process(connection.pid).cmdline()))
    return found


def left_behind(processes: Sequence[psutil.Process], deadline_s: float = 10.0) -> list[str]:
    """Those of the processes that still live, and our shared-memory files; empty is as it should be."""
    _, alive = psutil.wait_procs(processes, timeout=deadline_s)
    living = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    return [str(process) for process in living]


def shared_memory_files(run_id: str) -> list[str]:
    """What the run has in shared memory."""
    return [path.name for path in shm_directory().glob(f"{shm_prefix(run_id)}*")]


def processes_of_runs_in(folder: Path) -> list[str]:
    """Command lines of living processes that name a path below `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found
