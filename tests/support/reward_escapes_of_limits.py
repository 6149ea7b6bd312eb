"""Escapes from the reward sandbox by network, time, memory, descriptors and kernel interfaces; see `reward_escapes`."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.reward_escape_tools import ARM, LIBC, MIB, World, any_works, listed, others, system_call

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
        if threading.active_count() <= 400:
            return False
    # Between two looks it may have them; it may not keep them.
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
