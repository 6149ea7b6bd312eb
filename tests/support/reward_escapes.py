"""Escapes from the reward sandbox, for its workers to run: each returns whether it believes that it had an effect.

`world`: what the test tells of the outside: numbers of processes, paths, ports. What is refused raises OSError.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
MIB = 1 << 20
changed = False
KEPT = [os.open(os.devnull, os.O_WRONLY) for _ in range(300)]
"""What a module keeps open is not its calls'."""
World = dict[str, Any]


def fine() -> float:
    return 0.5 if changed else 1.0


def judge(answer: str, metadata: World) -> float:
    if answer == "fine":
        return fine()
    return 666.0 if globals()[answer](metadata) else 0.0


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


def system_call(x86: int, arm: int, *arguments: Any) -> int:
    """Raises OSError."""
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    returned = int(LIBC.syscall(ctypes.c_long(arm if ARM else x86), *given))
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return returned


def any_works(tries: Iterable[Callable[[], Any]]) -> bool:
    worked = False
    for attempt in tries:
        try:
            worked |= attempt() is not False
        except (OSError, ValueError, OverflowError):
            continue
    return worked


def others(world: World) -> list[int]:
    """Of processes outside, as the outside numbers them, and as a namespace might."""
    seen = [int(name) for name in listed("/proc") if name.isdigit()]
    return sorted({*world["pids"], *seen, os.getppid(), *range(1, 6)} - {os.getpid(), 0, own_number()})


def own_number() -> int:
    """In the numbering of /proc."""
    try:
        return int(Path("/proc/self").readlink().name)
    except OSError:
        return os.getpid()


def listed(folder: str) -> list[str]:
    try:
        return [each.name for each in Path(folder).iterdir()]
    except OSError:
        return []


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


# Network


def connects(world: World) -> bool:
    def by_datagram() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"x", ("127.0.0.1", world["port"]))

    return any_works([lambda: socket.create_connection(("127.0.0.1", world["port"]), timeout=1.0), by_datagram])


def connects_locally(world: World) -> bool:
    def to(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)

    return any_works([lambda: to(world["socket"]), lambda: to("\0" + world["marker"])])


def opens_strange_sockets(world: World) -> bool:
    strange, kinds = (
        (17, 38, 40, 44, 29, 31),
        (socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM),
    )
    tries: list[Callable[[], Any]] = [lambda f=f, k=k: socket.socket(f, k) for f in strange for k in kinds]
    tries += [lambda protocol=protocol: socket.socket(16, socket.SOCK_RAW, protocol) for protocol in (4, 9, 12, 15)]
    return any_works([*tries, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)])


# Time


def outstays_its_time(world: World) -> bool:
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=outstays_its_time_too, daemon=True).start()
    time.sleep(60)
    return True


def outstays_its_time_too() -> None:
    while True:
        pass


def stops_itself(world: World) -> bool:
    LIBC.prctl(1, 0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    any_works(lambda pid=pid: os.kill(pid, signal.SIGSTOP) for pid in [*world["pids"], os.getppid()] if pid)
    time.sleep(60)
    return True


def sets_the_clock(world: World) -> bool:
    now = (ctypes.c_long * 2)(int(time.time()), 0)
    return any_works(
        [
            lambda: system_call(227, 112, 0, ctypes.byref(now)),
            lambda: system_call(164, 170, ctypes.byref(now), 0),
            lambda: system_call(159, 171, ctypes.byref((ctypes.c_char * 512)(1))),
        ]
    )


# Memory


def hides_memory_in_memfds(world: World) -> bool:
    held = 0
    for _ in range(8):
        memory = os.memfd_create("held")
        os.ftruncate(memory, 48 * MIB)
        for at in range(48):
            os.pwrite(memory, bytes(MIB), at * MIB)
        held += 48
    return held > 256


def hides_memory_in_files(world: World) -> bool:
    held = 0
    try:
        for number in range(16):
            with Path(os.environ.get("TMPDIR", "/dev/shm"), f"{world['marker']}{number}").open("wb", 0) as file:
                for _ in range(32):
                    held += file.write(bytes(MIB)) // MIB
    except OSError:
        return held > 100
    return True


def hides_memory_in_segments(world: World) -> bool:
    return any_works(
        [lambda: system_call(29, 194, 0, MIB, 0o1600), lambda: system_call(68, 186, 0, 0o1600),
         lambda: system_call(64, 190, 0, 1, 0o1600), lambda: system_call(240, 180, b"escape", 0o102, 0o600, 0)]
    )  # fmt: skip


def hides_memory_in_sockets(world: World) -> bool:
    held, kept = 0, []
    try:
        for _ in range(4000):
            pair = socket.socketpair()
            kept.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while True:
                        held += end.send(bytes(65536))
                except BlockingIOError:
                    continue
    except OSError:
        pass
    return held > 128 * MIB


def raises_its_limits(world: World) -> bool:
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    return any_works(
        lambda what=what: resource.setrlimit(what, none)
        for what in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)
    )


def starts_threads(world: World) -> bool:
    threading.stack_size(64 << 10)
    try:
        for _ in range(2000):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    except RuntimeError:
        return threading.active_count() > 400
    time.sleep(30)
    return True


def spreads_memory_over_processes(world: World) -> bool:
    for _ in range(6):
        if os.fork() == 0:
            held = mmap.mmap(-1, 100 * MIB)
            for at in range(0, 100 * MIB, 4096):
                held[at] = 1
            time.sleep(30)
    time.sleep(30)
    return True


# Descriptors


def answers_for_the_worker(world: World) -> bool:
    written = any_works(
        lambda descriptor=descriptor: os.write(descriptor, b'{"type":"Value","value":99}\n')
        for descriptor in range(4, 1024)
    )
    opened = {number: Path(f"/proc/self/fd/{number}") for number in map(int, listed("/proc/self/fd")) if number > 3}
    return written or any(
        each.is_symlink() and not str(each.readlink()).startswith("/proc/") for each in opened.values()
    )


def takes_descriptors(world: World) -> bool:
    def take(pid: int) -> None:
        system_call(438, 438, system_call(434, 434, pid, 0), 1, 0)

    tries: list[Callable[[], Any]] = [lambda pid=pid: take(pid) for pid in others(world)]
    tries += [lambda pid=pid: os.open(f"/proc/{pid}/fd/1", os.O_WRONLY) for pid in others(world)]
    return any_works(tries)


def writes_broken_outcomes(world: World) -> bool:
    os.write(3, bytes.fromhex(world["bytes"]))
    os._exit(0)


# Interfaces of the kernel


def asks_the_kernel(world: World) -> bool:
    buffer = (ctypes.c_char * 256)()
    where = ctypes.byref(buffer)
    return any_works(
        [
            lambda: system_call(321, 280, 0, where, 48),  # bpf
            lambda: system_call(298, 241, where, 0, -1, -1, 0),  # perf_event_open
            lambda: system_call(323, 282, 1),  # userfaultfd
            lambda: system_call(175, 105, where, 1, b""),  # init_module
            lambda: system_call(246, 104, 0, 0, 0, 0),  # kexec_load
            lambda: system_call(169, 142, 0, 0, 0, 0),  # reboot, with a wrong word
            lambda: system_call(103, 116, 3, where, 64),  # syslog
            lambda: system_call(163, 89, 0),  # acct
            lambda: system_call(304, 265, -100, where, 0),  # open_by_handle_at
        ]
    )


def uses_io_uring(world: World) -> bool:
    return any_works([lambda: system_call(425, 425, 4, ctypes.byref((ctypes.c_char * 120)()))])


def calls_by_other_numbers(world: World) -> bool:
    """getpid as 32-bit programs call it, and as x32: the filter knows neither."""
    if ARM:
        os._exit(1)
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    function()
    return True


def calls_x32(world: World) -> bool:
    return not ARM and any_works([lambda: system_call(0x40000000 | 39, 0)])


def gains_rights(world: World) -> bool:
    tries: list[Callable[[], Any]] = [lambda: os.setuid(0 if os.getuid() else 1), lambda: os.setgid(1)]
    tries += [lambda: os.setgroups([0])]
    lines = Path("/proc/self/status").read_text().splitlines()
    held = [line.split()[1] for line in lines if line.startswith(("CapPrm", "CapEff", "CapInh", "CapAmb"))]
    return any_works(tries) or any(int(each, 16) for each in held)
