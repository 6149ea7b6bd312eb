"""Child processes, ports and the reaper, with real small processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from services.policies.backoff import RestartPolicy
from services.policies.diagnosis.logs import of_interrupted
from services.supervisor.launch_plan import PortReservation
from services.supervisor.processes import Child, ManagedProcess, ProcessSpec, Reaper, Role, ServiceFailedError
from services.wire.errors import UsageError

ROOT = Path(__file__).parents[3]
# A parent that starts a child of its own in the same group, says so, and lives on.
_FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _FAMILY


def python(code: str, name: str = "child") -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code))


async def until(what: str, holds: Callable[[], bool], deadline_s: float = 10.0) -> None:
    ends = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
async def reaper(tmp_path: Path) -> AsyncIterator[Reaper]:
    async with Reaper(tmp_path / "shm-run-") as reaper:
        yield reaper


@pytest.mark.parametrize("code", [_FAMILY, _STUBBORN], ids=["obedient", "stubborn"])
async def test_stopping_a_child_ends_what_it_started(code: str, tmp_path: Path, reaper: Reaper) -> None:
    log = tmp_path / "child.log"
    child = await Child.start(python(code), log, reaper)
    await until("the child says its child's id", lambda: log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    assert not gone(grandchild)
    began = time.monotonic()
    await child.stop(0.5)
    assert time.monotonic() - began < 5.0
    assert gone(child.pid)
    await until("the grandchild is gone", lambda: gone(grandchild))


async def test_a_child_that_dies_leaves_no_child_of_its_own(tmp_path: Path, reaper: Reaper) -> None:
    log = tmp_path / "child.log"
    child = await Child.start(python(_FAMILY), log, reaper)
    await until("the child says its child's id", lambda: log.read_text().endswith("\n"))
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    await until("the grandchild is gone", lambda: gone(int(log.read_text())))


def managed(code: str, role: Role, logs: Path, reaper: Reaper, said: list[str], restarts: int = 3) -> ManagedProcess:
    policy = RestartPolicy(max_restarts=restarts, first_delay_s=0.01)
    spec = dataclasses.replace(python(code), role=role, restarts=policy)
    return ManagedProcess(spec, logs, reaper, said.append)


async def test_a_job_that_dies_is_started_again_until_it_is_done(tmp_path: Path, reaper: Reaper) -> None:
    code = f"""
from pathlib import Path
tries = Path({str(tmp_path / "tries")!r})
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
raise SystemExit(0 if len(tries.read_text()) == 3 else 1)
"""
    said: list[str] = []
    job = managed(code, "job", tmp_path, reaper, said)
    await job.run()
    assert (tmp_path / "tries").read_text() == "xxx"
    assert job.restarts == 2
    assert len(said) == 2
    assert "exit code 1" in said[0]


async def test_a_service_that_keeps_dying_fails_with_the_end_of_its_log(tmp_path: Path, reaper: Reaper) -> None:
    said: list[str] = []
    service = managed("raise RuntimeError('no such disk')", "service", tmp_path, reaper, said, restarts=1)
    with pytest.raises(ServiceFailedError, match=r"2 times in a row(.|\n)*no such disk"):
        await service.run()
    assert len(said) == 1


async def test_a_service_that_keeps_dying_and_says_why_fails_in_one_line(tmp_path: Path, reaper: Reaper) -> None:
    code = "import sys; sys.stderr.write('details\\nrollmesh: an episode failed\\n'); sys.exit(1)"
    service = managed(code, "service", tmp_path, reaper, [], restarts=0)
    with pytest.raises(ServiceFailedError, match="not started again: an episode failed") as failed:
        await service.run()
    assert "\n" not in str(failed.value)


async def test_a_service_that_refuses_its_command_line_is_misuse_in_one_line(tmp_path: Path, reaper: Reaper) -> None:
    code = "import sys; sys.stderr.write('rollmesh: no engine here: install one\\n'); sys.exit(2)"
    with pytest.raises(UsageError) as refused:
        await managed(code, "service", tmp_path, reaper, []).run()
    assert str(refused.value) == "child cannot start: no engine here: install one"


async def test_a_job_that_gives_the_run_up_ends_it_in_one_line(tmp_path: Path, reaper: Reaper) -> None:
    code = "import sys; sys.stderr.write('rollmesh: no batch within 120 s: see the logs\\n'); sys.exit(3)"
    said: list[str] = []
    job = managed(code, "job", tmp_path, reaper, said)
    with pytest.raises(ServiceFailedError, match="child gave the run up: no batch within 120 s"):
        await job.run()
    assert (job.restarts, said) == (0, [])


@pytest.mark.parametrize("json_logs", ["0", "1"])
async def test_an_environment_that_lost_every_group_is_not_started_again_and_its_sentence_is_told(
    json_logs: str, tmp_path: Path, reaper: Reaper
) -> None:
    code = (
        "import sys\nfrom services.cli import fail\nfrom services.observability.logging import configure_logging\n"
        "from clients.runner.failures import GroupFailures, TooManyLostError\n"
        "configure_logging('environment')\nlosses = GroupFailures(retries=0)\n"
        "try:\n    for _ in range(64): losses.lost('environment', 'mine: ValueError: no\\ntool (agent.py:41)', 0)\n"
        "except TooManyLostError as error: sys.exit(fail(str(error), error.exit_code))"
    )
    said: list[str] = []
    spec = dataclasses.replace(
        python(code, "environment"), role="job", environment={"ROLLMESH_LOG_JSON": json_logs, "PYTHONPATH": str(ROOT)}
    )
    job = ManagedProcess(spec, tmp_path, reaper, said.append)
    with pytest.raises(ServiceFailedError) as failed:
        await job.run()
    sentence = (
        "the last 64 groups were lost and none was played: fix the environment; "
        "the last error was: mine: ValueError: no tool (agent.py:41)"
    )
    assert str(failed.value) == f"environment gave the run up: {sentence}: see {job.log}"
    assert (job.restarts, said, failed.value.exit_code) == (0, [], 1)
    (found,) = of_interrupted("runs/a", 0, 60, {"environment": job.log.read_text(), "s0": "2026 [error ] other"})
    assert (found.id, found.evidence) == ("groups-lost", sentence)
    assert "rollmesh up --resume runs/a" in found.remedy
    (later,) = of_interrupted("runs/a", 9, 60, {"environment": job.log.read_text() + "2026 [info ] played\n" * 9})
    assert later.id == "run-failed", "it was resumed since"


async def test_even_a_service_that_ends_well_is_started_again(tmp_path: Path, reaper: Reaper) -> None:
    said: list[str] = []
    with pytest.raises(ServiceFailedError):
        await managed("pass", "service", tmp_path, reaper, said, restarts=2).run()
    assert len(said) == 2


async def test_a_cancelled_supervisor_leaves_its_process_to_stop(tmp_path: Path, reaper: Reaper) -> None:
    kept = managed("import time; time.sleep(600)", "service", tmp_path, reaper, [])
    running = asyncio.create_task(kept.run())
    await until("the process runs", lambda: kept.child is not None)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert kept.child is not None
    assert kept.child.running
    await kept.stop(5.0)
    assert gone(kept.child.pid)


# A supervisor in small: it starts a family and then waits to be killed.
_SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from services.supervisor.processes import Child, Reaper, ProcessSpec

async def main():
    folder = Path(sys.argv[1])
    async with Reaper(folder / "shm-run-") as reaper:
        if sys.argv[3] == "untold":  # as if it were killed just before
            reaper.started = lambda group: None
        await Child.start(ProcessSpec("child", (sys.executable, "-c", sys.argv[2])), folder / "child.log", reaper)
        await asyncio.sleep(600)

asyncio.run(main())
"""


_UNTOLD = pytest.param(
    _FAMILY,
    "untold",
    marks=[pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="such a child is found in /proc")],
)


@pytest.mark.parametrize(
    ("code", "told"), [(_FAMILY, "told"), (_STUBBORN, "told"), _UNTOLD], ids=["obedient", "stubborn", "untold"]
)
def test_a_killed_supervisor_leaves_no_process_and_no_shared_memory(code: str, told: str, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    supervisor = subprocess.Popen([sys.executable, "-c", _SUPERVISOR, str(tmp_path), code, told])
    try:
        deadline = time.monotonic() + 20.0
        while not (log.exists() and log.read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (tmp_path / "shm-run-arena").write_text("x")
        (tmp_path / "shm-other").write_text("x")
        descendants = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(descendants) == 3, "the reaper, the child, the child's child"
    finally:
        supervisor.kill()
        supervisor.wait()
    # The stubborn family is given the reaper's grace first.
    _, alive = psutil.wait_procs(descendants, timeout=15.0)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not (tmp_path / "shm-run-arena").exists()
    assert (tmp_path / "shm-other").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot hold a port and let a child have it")
def test_a_reserved_port_is_kept_from_others_and_open_to_our_child() -> None:
    with PortReservation() as ports:
        port = ports.reserve()
        assert ports.reserve() != port
        with socket.socket() as stranger:
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
        for _ in range(2):  # the second time as a restarted service, past connections in TIME_WAIT
            with socket.socket() as ours, socket.socket() as caller:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                ours.bind(("127.0.0.1", port))
                ours.listen()
                caller.connect(("127.0.0.1", port))
                ours.accept()[0].close()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
