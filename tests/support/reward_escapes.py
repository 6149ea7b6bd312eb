"""Escapes from the reward sandbox, for its workers to run: each returns whether it believes that it had an effect.

`world`: what the test tells of the outside: numbers of processes, paths, ports. What is refused raises OSError.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import reward_escapes_of_limits
from tests.support.reward_escape_tools import MIB, World, any_works, listed, others, system_call

changed = False
KEPT = [os.open(os.devnull, os.O_WRONLY) for _ in range(300)]
"""What a module keeps open is not its calls'."""


def fine() -> float:
    return 0.5 if changed else 1.0


def judge(answer: str, metadata: World) -> float:
    if answer == "fine":
        return fine()
    escape = globals().get(answer) or getattr(reward_escapes_of_limits, answer)
    return 666.0 if escape(metadata) else 0.0


def does_what_it_may(world: World) -> bool:
    """No escape: what calls are for. Raises where something is refused; true where something is not as it should be."""
    import colorsys
    import tempfile

    here = Path(__file__)
    Path("/dev/null").write_text("x")
    read = [Path(world["shared"]).read_text(), here.read_text()[:3], Path(here.name).read_text()[:3]]
    left, right = socket.socketpair()
    left.send(b"x")
    ran: list[int] = []
    thread = threading.Thread(target=ran.append, args=(1,))
    thread.start()
    thread.join()
    if world["scratch"]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(MIB))
        Path(tempfile.gettempdir(), "kept").touch(exist_ok=False)
        Path("/dev/shm/kept too").touch(exist_ok=False)
    known = (read[0], right.recv(1), ran, colorsys.rgb_to_hsv(0, 0, 0), Path.cwd() == here.parent)
    signal.raise_signal(signal.SIGCONT)
    return known != ("shared", b"x", [1], (0.0, 0.0, 0), True) or Path("/proc/self/stat").read_text() == ""


# The worker's memory


def writes_memory_by_proc(world: World) -> bool:
    return any_works(lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDWR) for pid in others(world))


def traces(world: World) -> bool:
    return any_works(lambda pid=pid: system_call(101, 117, 16, pid, 0, 0) for pid in others(world))


def writes_memory_by_call(world: World) -> bool:
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 8)
    reads, writes = (310, 270), (311, 271)
    return any_works(
        lambda pid=pid, which=which: system_call(*which, pid, ctypes.byref(vector), 1, ctypes.byref(vector), 1, 0)
        for pid in others(world)
        for which in (reads, writes)
    )


def rewrites_the_module_on_disk(world: World) -> bool:
    return any_works([lambda: Path(__file__).write_text("def judge(**_): return 666"), lambda: Path(__file__).unlink()])


def rewrites_the_module_in_memory(world: World) -> bool:
    global changed
    changed = True
    globals()["judge"] = lambda **_: 666.0
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("services.rewards"):
            for name in list(vars(module)):
                if not name.startswith("__"):
                    setattr(module, name, None)
    return False


# Other processes


def kills(world: World) -> bool:
    tries: list[Callable[[], Any]] = [lambda pid=pid: os.kill(pid, signal.SIGKILL) for pid in world["pids"]]
    tries += [lambda: os.kill(os.getppid(), signal.SIGKILL) if os.getppid() else False]
    tries += [lambda pid=pid: system_call(424, 424, system_call(434, 434, pid, 0), 9, 0, 0) for pid in world["pids"]]
    return any_works(tries)


def kills_all_that_it_may(world: World) -> bool:
    return any_works([lambda: os.kill(-1, signal.SIGKILL), lambda: os.kill(0, signal.SIGCONT)]) and False


def lowers_limits_of_others(world: World) -> bool:
    none = (ctypes.c_ulong * 2)(16, 16)
    return any_works(
        lambda pid=pid: system_call(302, 261, pid, resource.RLIMIT_NOFILE, ctypes.byref(none), 0)
        for pid in world["pids"]
    )


def slows_others(world: World) -> bool:
    tries: list[Callable[[], Any]] = [lambda pid=pid: os.sched_setaffinity(pid, {0}) for pid in world["pids"]]
    tries += [lambda pid=pid: os.setpriority(os.PRIO_PROCESS, pid, 19) for pid in world["pids"]]
    tries += [lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19)]
    return any_works(tries)


def signals_by_descriptor(world: World) -> bool:
    def own(pid: int) -> None:
        reads, writes = os.pipe()
        fcntl.fcntl(reads, fcntl.F_SETOWN, pid)
        fcntl.fcntl(reads, 10, signal.SIGKILL)
        fcntl.fcntl(reads, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writes, b"x")

    return any_works(lambda pid=pid: own(pid) for pid in world["pids"])


def starts_a_process(world: World) -> bool:
    return any_works([os.fork, lambda: subprocess.run(["true"], check=True), lambda: system_call(435, 435, 0, 0)])


def leaves_processes_behind(world: World) -> bool:
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in range(1, 64):
                    if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                        signal.signal(number, signal.SIG_IGN)
                time.sleep(60)
            os._exit(0)
    return False


# Files


def writes_files(world: World) -> bool:
    for folder in (".", "/tmp", "/var/tmp", "/dev/shm", "/.scratch", os.environ.get("TMPDIR", "/tmp")):
        any_works([lambda folder=folder: Path(folder, world["marker"]).write_text("x")])
    return any_works(lambda place=place: Path(place, world["marker"]).write_text("x") for place in world["writable"])


def finds_files_of_another_call(world: World) -> bool:
    return any(world["marker"] in listed(folder) for folder in (".", "/tmp", "/var/tmp", "/dev/shm", "/.scratch"))


def reads_files(world: World) -> bool:
    around = ("", "/proc/self/root", "/proc/1/root", f"/proc/{os.getppid()}/root", "/proc/self/cwd/../../../../../..")
    return any_works(lambda way=way: Path(way + world["secret"]).read_text() for way in around)


def changes_files(world: World) -> bool:
    file = world["secret"]
    return any_works(
        [
            lambda: os.truncate(file, 0),
            lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
            lambda: Path(file).chmod(0o777),
            lambda: os.utime(file, (1, 1)),
            lambda: os.setxattr(file, "user.escape", b"x"),
            lambda: Path(__file__).chmod(0o777),
            lambda: os.utime(__file__, (1, 1)),
            lambda: os.open(__file__, os.O_RDONLY | os.O_TRUNC),
            lambda: os.truncate(__file__, 0),
            lambda: Path(__file__).rename(__file__ + ".old"),
            lambda: os.link(__file__, str(Path(world["writable"][0], world["marker"]))),
            lambda: Path("/dev/null").chmod(0o600),
        ]
    )


def sets_the_kernel(world: World) -> bool:
    files = (
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/pid_max",
        "/proc/sysrq-trigger",
        "/proc/self/oom_score_adj",
    )
    return any_works(lambda file=file: os.open(file, os.O_WRONLY) for file in files[:3])


def opens_disks(world: World) -> bool:
    devices = [f"/dev/{name}" for name in listed("/dev") if name not in ("null", "zero", "full", "random", "urandom")]
    named = [each for each in devices if Path(each).is_block_device()]

    def makes() -> None:
        os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0))
        os.open("/tmp/disk", os.O_RDONLY)

    return any_works(
        [*(lambda each=each: os.open(each, os.O_RDONLY) for each in [*named, "/dev/vda", "/dev/mem"]), makes]
    )


def mounts(world: World) -> bool:
    return any_works(
        [
            lambda: system_call(165, 40, b"none", b"/tmp", b"tmpfs", 0, 0),
            lambda: system_call(165, 40, 0, b"/", 0, 32 | 4096, 0),
            lambda: system_call(166, 39, b"/proc", 2),
            lambda: system_call(272, 97, 0x10000000 | 0x20000),
            lambda: system_call(308, 268, os.open("/proc/self/ns/mnt", os.O_RDONLY), 0),
            lambda: os.chroot("/tmp"),
            lambda: system_call(430, 430, b"tmpfs", 0),
            lambda: system_call(428, 428, -100, b"/", 1),
        ]
    )


# Keys


def reads_keys(world: World) -> bool:
    def by_link() -> str:
        link = Path(os.environ.get("TMPDIR", "/tmp"), "link")
        link.symlink_to(world["key"])
        return link.read_text()

    return any_works([lambda: Path(world["key"]).read_text(), lambda: Path("keys/agent.key").read_text(), by_link])


def reads_environments(world: World) -> bool:
    files = [f"/proc/{pid}/{name}" for pid in others(world) for name in ("environ", "maps", "auxv")]
    return any_works(lambda file=file: bool(Path(file).read_bytes()) for file in files)


def uses_the_keyring(world: World) -> bool:
    name = world["marker"].encode()
    return any_works(
        [lambda: system_call(248, 217, b"user", name, b"x", 1, -4), lambda: system_call(250, 219, 0, -4, 0)]
    )
