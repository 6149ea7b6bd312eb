"""Escapes from the reward sandbox, by class, as root, as nobody, and where namespaces are refused: none has an effect."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.compose_stack import ROOT

NOBODY = 65534

ESCAPES = [
    ("memory of the worker", "writes_memory_by_proc", "plain"),
    ("memory of the worker", "traces", "plain"),
    ("memory of the worker", "writes_memory_by_call", "plain"),
    ("memory of the worker", "rewrites_the_module_on_disk", "plain"),
    ("memory of the worker", "rewrites_the_module_in_memory", "plain"),
    ("memory of the worker", "writes_memory_by_proc", "processes"),
    ("other processes", "kills", "plain"),
    ("other processes", "kills", "processes"),
    ("other processes", "kills_all_that_it_may", "plain"),
    ("other processes", "lowers_limits_of_others", "plain"),
    ("other processes", "slows_others", "plain"),
    ("other processes", "signals_by_descriptor", "plain"),
    ("other processes", "starts_a_process", "plain"),
    ("other processes", "leaves_processes_behind", "processes"),
    ("files", "writes_files", "plain"),
    ("files", "finds_files_of_another_call", "plain"),
    ("files", "reads_files", "plain"),
    ("files", "reads_files", "processes"),
    ("files", "changes_files", "plain"),
    ("files", "sets_the_kernel", "plain"),
    ("files", "opens_disks", "plain"),
    ("files", "mounts", "plain"),
    ("keys", "reads_keys", "plain"),
    ("keys", "reads_environments", "plain"),
    ("keys", "uses_the_keyring", "plain"),
    ("network", "connects", "plain"),
    ("network", "connects_locally", "network"),
    ("network", "opens_strange_sockets", "network"),
    ("time", "outstays_its_time", "short"),
    ("time", "stops_itself", "short"),
    ("time", "sets_the_clock", "plain"),
    ("memory", "hides_memory_in_memfds", "plain"),
    ("memory", "hides_memory_in_files", "plain"),
    ("memory", "hides_memory_in_segments", "plain"),
    ("memory", "hides_memory_in_sockets", "plain"),
    ("memory", "raises_its_limits", "plain"),
    ("memory", "starts_threads", "plain"),
    ("memory", "spreads_memory_over_processes", "processes"),
    ("descriptors", "answers_for_the_worker", "plain"),
    ("descriptors", "takes_descriptors", "plain"),
    ("kernel interfaces", "asks_the_kernel", "plain"),
    ("kernel interfaces", "uses_io_uring", "plain"),
    ("kernel interfaces", "calls_by_other_numbers", "plain"),
    ("kernel interfaces", "calls_x32", "plain"),
    ("kernel interfaces", "gains_rights", "plain"),
]
CAUSES = {
    "outstays_its_time": ["timeout"],
    "stops_itself": ["timeout"],
    "hides_memory_in_memfds": ["raised"],
    "spreads_memory_over_processes": ["memory"],
    "calls_by_other_numbers": ["crash"],
}
"""What else would be no proof: that it had no effect could have other reasons."""
BROKEN = {
    "no UTF-8": b'{"type":"Failed","cause":"raised","what":"\xff\xfe"}',
    "half a text": b'{"type":"Value","val',
    "nested deeply": b'{"type":"Value","value":1,"more":' + b"[" * 30000 + b"]" * 30000 + b"}",
    "infinite": b'{"type":"Value","value":1e999}',
    "not a number": b'{"type":"Value","value":NaN}',
    "nothing": b"",
    "two": b'{"type":"Value","value":1}\n{"type":"Value","value":2}',
}


@dataclass
class World:
    """A folder with the functions and a key, what lies beside it, a process of the same user, and the sandbox's driver."""

    user: int
    contained: bool
    base: Path
    stack: ExitStack
    marker: str = field(default_factory=lambda: f"escape-{os.getpid()}-{time.monotonic_ns()}")

    def __post_init__(self) -> None:
        self.folder, self.outside = self.base / "functions", self.base / "outside"
        self.shared = self.base / "shared" / "words.txt"
        for each in (self.folder, self.folder / "keys", self.outside, self.shared.parent):
            each.mkdir()
        self.shared.write_text("shared")
        shutil.copy(ROOT / "tests/support/reward_escapes.py", self.folder)
        self.key, self.secret = self.folder / "keys" / "agent.key", self.outside / "secret.txt"
        for each in (self.key, self.secret):
            each.write_text("the secret")
            each.chmod(0o600)
        for each in (self.base, *self.base.rglob("*")):
            os.chown(each, self.user, -1)
        self.base.chmod(0o755)
        self.tcp = self._listening(socket.AF_INET, ("127.0.0.1", 0))
        self.local = self._listening(socket.AF_UNIX, str(self.outside / "socket"))
        os.chown(self.outside / "socket", self.user, -1)
        self._listening(socket.AF_UNIX, "\0" + self.marker)
        python, path = self._python()
        self.victim = self._start([python, "-c", "import time; time.sleep(600)"])
        said = "contained" if self.contained else ""
        self.driver = self._start(
            [python, "-m", "tests.support.reward_driver", said],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, "ROLLMESH_AGENT_KEY": "the secret"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pids = [self.victim.pid, self.driver.pid, os.getpid()]

    def _listening(self, family: int, address: Any) -> socket.socket:
        server = self.stack.enter_context(socket.socket(family))
        server.bind(address)
        server.listen()
        server.setblocking(False)
        return server

    def _python(self) -> tuple[str, str]:
        """An interpreter that this user may run, and its path: the tests' own may lie in root's home."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = str(Path(pytest.__file__).parents[1])
        for python, path in ((sys.executable, str(ROOT)), (f"/usr/bin/{version}", f"{ROOT}:{packages}")):
            with suppress(OSError):
                trial = self._start([python, "-c", "import msgspec, services.wire"], env={"PYTHONPATH": path})
                if trial.wait(60.0) == 0:
                    return python, path
        pytest.skip(f"no Python that user {self.user} may run")

    def _start(self, command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        who = {} if self.user == os.getuid() else {"user": self.user, "group": self.user, "extra_groups": []}
        process = self.stack.enter_context(subprocess.Popen(command, **who, **given))
        self.stack.callback(process.kill)
        return process

    def call(self, answer: str, worker: str = "plain", **more: Any) -> dict[str, Any]:
        told = {
            "pids": [*self.pids, *(each.pid for each in self.workers())],
            "marker": self.marker,
            "secret": str(self.secret),
            "key": str(self.key),
            "shared": str(self.shared),
            "scratch": not self.contained,
            "writable": [str(self.outside), str(self.folder)],
            "port": self.tcp.getsockname()[1],
            "socket": str(self.outside / "socket"),
            **more,
        }
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        asked = {"worker": worker, "answer": answer, "metadata": told}
        self.driver.stdin.write(json.dumps(asked).encode() + b"\n")
        self.driver.stdin.flush()
        line = self.driver.stdout.readline()
        assert line, "the service's side has ended"
        answered: dict[str, Any] = json.loads(line)
        return answered

    def workers(self) -> list[Any]:
        return psutil.Process(self.driver.pid).children(recursive=True)

    def seen(self) -> dict[str, Any]:
        """All that an escape could have changed out there."""
        places = [*self.base.rglob("*"), Path("/dev/null")]
        victims = [psutil.Process(each) for each in (self.victim.pid, self.driver.pid)]
        left = [str(each) for place in ("/tmp", "/var/tmp", "/dev/shm") for each in Path(place).glob(self.marker + "*")]
        return {
            "files": {str(each): (each.lstat().st_mode, each.lstat().st_mtime_ns) for each in places if each.exists()},
            "left": left,
            "contents": [each.read_bytes() for each in (self.key, self.secret, self.folder / "reward_escapes.py")],
            "victims": [
                (
                    each.pid,
                    each.status() == "stopped",
                    each.nice(),
                    each.cpu_affinity(),
                    Path(f"/proc/{each.pid}/limits").read_text(),
                )
                for each in victims
            ],
            "workers": {each.pid for each in self.workers()},
            "pid_max": Path("/proc/sys/kernel/pid_max").read_text(),
            "core_pattern": Path("/proc/sys/kernel/core_pattern").read_text(),
        }


@pytest.fixture(scope="module", params=["root", "nobody", "contained"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "root" and os.getuid() != 0:
        pytest.skip("not root")
    user = NOBODY if os.getuid() == 0 and request.param != "root" else os.getuid()
    base = Path(tempfile.mkdtemp(prefix="rollmesh-escapes-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, base)
        yield World(user, request.param == "contained", base, stack)


@pytest.mark.parametrize(("kind", "escape", "worker"), ESCAPES)
def test_an_escape_is_refused_or_without_effect(world: World, kind: str, escape: str, worker: str) -> None:
    began = world.call("fine", worker)
    if world.contained and worker == "processes":
        assert "cannot be confined here" in began["refused"]
        return
    assert began["value"] == 1.0, began
    assert ("namespaces" in began["held_by"]) != world.contained
    before = world.seen()
    ended = world.call(escape, worker)
    assert ended.get("value") in (None, 0.0), ended
    if escape in CAUSES:
        assert ended["cause"] in CAUSES[escape], ended
    assert world.seen() == before
    after = world.call("fine", worker)
    assert after["value"] == 1.0, after
    for listening in (world.tcp, world.local):
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize("what", BROKEN)
def test_an_outcome_that_cannot_be_read_is_a_crash_of_its_call_alone(world: World, what: str) -> None:
    before = world.seen()
    ended = world.call("writes_broken_outcomes", bytes=BROKEN[what].hex())
    assert (ended.get("cause"), ended.get("what")) == ("crash", "it ended without an outcome that can be read")
    assert world.seen() == before, "the same worker goes on"


def test_a_call_does_what_it_may(world: World) -> None:
    for _ in range(2):
        ended = world.call("does_what_it_may")
        assert ended.get("value") == 0.0, ended
        assert ended["not_confined"] == []


def test_where_a_limit_is_not_sure_only_a_setting_starts_a_worker(world: World) -> None:
    unsure = world.call("fine", "unsure")
    assert unsure["value"] == 1.0
    assert [line.partition(" ")[0] for line in unsure["not_confined"]] == (["processes"] if world.contained else [])


def test_there_are_thirty_escapes_of_every_class() -> None:
    assert len({escape for _, escape, _ in ESCAPES}) >= 30
    classes = {kind for kind, _, _ in ESCAPES}
    asked = "memory of the worker, other processes, files, keys, network, time, memory, descriptors, kernel interfaces"
    assert classes == set(asked.split(", "))
