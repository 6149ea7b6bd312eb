"""Sandbox limits of a reward worker and of each of its calls (rlimits, namespaces, seccomp).

    worker, before the user's module is imported   memory, size of files, no core, no network
    call, in its forked child                      processor time, a process namespace that ends with it and in which it
                                                   cannot name others, no further process, death with its worker

Memory is address space (RLIMIT_AS): the only bound that holds without a cgroup. Files are not hidden: run the service as
a user who can read what functions need, and write nothing of worth.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import NoReturn

from services.rewards.sandbox.protocol import Limits

MOST_PROCESSES = 301
"""In a call that may start processes; the kernel takes no smaller bound for a process namespace."""
_FILE_BYTES = 64 << 20
_OPEN_FILES = 1024
_SIGNALLED = 128


def confine_worker(limits: Limits) -> list[str]:
    """Hold this process, for good, to what all its calls share. Returns in words what cannot be enforced here."""
    die_with_parent()
    missing = []
    filtered, apart = can_filter(), leave_namespaces(network=not limits.network)
    if not limits.network and not filtered and not apart:
        missing.append("no network: user namespaces are refused, and system calls cannot be filtered on this machine")
    if not limits.processes and not filtered:
        missing.append("no processes: system calls cannot be filtered on this machine")
    if not apart:
        missing.append("a call can signal this user's other processes: user namespaces are refused")
        if limits.processes:
            missing.append("processes are not counted, and can outlive a call: user namespaces are refused")
    _bound(resource.RLIMIT_AS, limits.memory_mib << 20)
    _bound(resource.RLIMIT_CORE, 0)
    _bound(resource.RLIMIT_FSIZE, _FILE_BYTES)
    _bound(resource.RLIMIT_NOFILE, _OPEN_FILES)
    return missing


def confine_call(limits: Limits) -> None:
    """Hold this child to its call's limits.

    Where a process namespace can be had it returns in a descendant of this process, which then ends as that one does.
    """
    die_with_parent()
    seconds = math.ceil(limits.time_s) + 1
    _bound(resource.RLIMIT_CPU, seconds)
    if begin_process_namespace():
        _go_on_in_child()
        if limits.processes:
            _few_processes()
        # The first process of a namespace is deaf to signals from inside: the function must not be it.
        _go_on_in_child()
    filter_calls(deny_processes=not limits.processes, deny_network=not limits.network)


def _few_processes() -> None:
    # Not everywhere: the one since Linux 6.14 where /proc is writable, the other for anybody but root.
    with contextlib.suppress(OSError):
        Path("/proc/sys/kernel/pid_max").write_text(str(MOST_PROCESSES), encoding="ascii")
    _bound(resource.RLIMIT_NPROC, MOST_PROCESSES)


def _go_on_in_child() -> None:
    """Return in a forked child; this process waits for it, then ends as it did."""
    watching, held = os.pipe()
    child = os.fork()
    if child:
        os.close(watching)
        _mirror(child)
    os.close(held)
    die_with_parent()
    os.set_blocking(watching, False)
    try:
        os.read(watching, 1)
        os._exit(1)  # The parent ended before the line above it took hold.
    except BlockingIOError:
        os.close(watching)


def _mirror(child: int) -> NoReturn:
    # The pipe end that tells the child of this process's life stays open until here.
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else _SIGNALLED - code)


def describe_end(exit_code: int) -> str:
    """How a call's process ended that has said nothing; `exit_code` as `os.waitstatus_to_exitcode` gives it."""
    if exit_code == 0:
        return "it ended without an outcome that can be read"
    number = -exit_code if exit_code < 0 else exit_code - _SIGNALLED
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(number).name}"
    return f"it ended by itself with exit code {exit_code}"


def ran_out_of_time(exit_code: int) -> bool:
    """Whether the kernel ended a process for its processor time."""
    return exit_code in (-signal.SIGXCPU, _SIGNALLED + signal.SIGXCPU)


def _bound(what: int, most: int) -> None:
    """Lower a limit; one that is lower already stays."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


# Linux calls that Python's standard library lacks: namespaces, a parent-death signal, a seccomp filter.
#
# The filter is a classic BPF program (linux/filter.h, linux/seccomp.h) of a few instructions, for x86-64 and ARM64:
#
#     another architecture's call     ──► killed
#     fork, vfork, clone of a process ──► EPERM          clone of a thread ──► allowed
#     clone3                          ──► ENOSYS: the C library then calls clone, whose flags can be seen
#     socket of another family        ──► EPERM          io_uring_setup    ──► EPERM: it could do both unseen

_NEWUSER, _NEWPID, _NEWNET, _NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 1, 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD, _AF_UNIX = 0x00010000, 1
_X32 = 0x40000000
# Audit architecture, then the numbers of clone, socket, and of fork and vfork where they exist.
_MACHINES = {"x86_64": (0xC000003E, 56, 41, (57, 58)), "aarch64": (0xC00000B7, 220, 198, ())}
_CLONE3, _IO_URING_SETUP = 435, 425


def leave_namespaces(*, network: bool) -> bool:
    """Leave the user's and the IPC namespace for empty ones, the network's too with `network`. For one thread only.

    Who this process is stays the same. False where the kernel refuses; then nothing has changed.
    """
    if sys.platform != "linux":
        return False
    user, group = os.geteuid(), os.getegid()
    if _libc().unshare(_NEWUSER | _NEWIPC | (_NEWNET if network else 0)) != 0:
        return False
    for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    return True


def begin_process_namespace() -> bool:
    """Have the next child be the first process of a namespace, with whose end all others in it are killed."""
    return sys.platform == "linux" and bool(_libc().unshare(_NEWPID) == 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A parent that has ended already is not noticed."""
    if sys.platform == "linux":
        _libc().prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def can_filter() -> bool:
    """Whether the filter below can be had on this machine, tried in a child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if filter_calls(deny_processes=True, deny_network=True) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def filter_calls(*, deny_processes: bool, deny_network: bool) -> bool:
    """Refuse this process, for good, to start others, or to open sockets other than local ones. False: cannot be."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return False
    architecture, clone, socket, forks = _MACHINES[platform.machine()]
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    if forks:
        program += [_instruction(_AT_LEAST, _X32, 0, 1), _instruction(_RETURN, _KILL)]
    program += _refuse(_IO_URING_SETUP, errno.EPERM)
    if deny_processes:
        for number in forks:
            program += _refuse(number, errno.EPERM)
        program += [*_refuse(_CLONE3, errno.ENOSYS), *_refuse_unless(clone, _ANY_BIT, _CLONE_THREAD)]
    if deny_network:
        program += _refuse_unless(socket, _EQUAL, _AF_UNIX)
    program.append(_instruction(_RETURN, _ALLOW))
    return _install(b"".join(program))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """`struct sock_filter`; the jumps count instructions to pass over."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int, error: int) -> list[bytes]:
    return [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _ERRNO | error)]


def _refuse_unless(number: int, test: int, value: int) -> list[bytes]:
    """Refuse call `number` unless `test` of the low half of its first argument with `value` holds."""
    return [
        _instruction(_EQUAL, number, 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(test, value, 0, 1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
    ]


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _install(program: bytes) -> bool:
    libc = _libc()
    whole = _Program(len(program) // 8, program)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(whole), 0, 0) == 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
