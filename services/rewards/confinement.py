"""What a worker and each of its calls are held to.

    worker, before the user's module is imported   memory, size of files, no core, no network
    call, in its forked child                      processor time, a process namespace that ends with it and in which it
                                                   cannot name others, no further process, death with its worker

Memory is address space (RLIMIT_AS): the only bound that holds without a cgroup. Files are not hidden: run the service as
a user who can read what functions need, and write nothing of worth.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from pathlib import Path
from typing import NoReturn

from services.rewards.system_calls import (
    begin_process_namespace,
    can_filter,
    die_with_parent,
    filter_calls,
    leave_namespaces,
)
from services.rewards.worker_wire import Limits

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
