"""How a worker and each of its calls are held: what this kernel offers, what is then not sure, and the order of it all.

    service ──► worker: tries the means ──► own namespaces: ──fork──► process 1 of them: imports the function
                     │                                                     └──► own file system, no capabilities, filter
                     └─► no namespaces (a container): imports the function ──► no capabilities, filter, Landlock's rules

    a call   namespaces: one fork, process 1 of a PID namespace of its own: all that it starts ends with it
             both:       limits, no capabilities, not to be looked into, filter; Landlock where there is no namespace

Memory is address space (RLIMIT_AS), which counts all memory that a filtered process can have but for kernel buffers and
scratch files; of several processes together it is looked at (`usage`).
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from services.rewards.sandbox import kernel
from services.rewards.sandbox.files import View, view_of, wanted_by_python
from services.rewards.sandbox.landlock import FileRules
from services.rewards.sandbox.mounts import SCRATCH, OwnFiles, enter_view, separate_mounts
from services.rewards.sandbox.protocol import Files, Limits
from services.rewards.sandbox.syscall_filter import CallRules, call_program, worker_program
from services.rewards.sandbox.usage import Usage

_FILE_BYTES = 64 << 20
_OPEN_FILES_OF_WORKER, _OPEN_FILES_OF_CALL = 1024, 256
_QUEUED_SIGNALS = 256
_MOST_PIDS = 301
"""Above what `usage` allows; the kernel takes no smaller bound for a PID namespace."""
_OWN_PID_MAX = (6, 14)
"""The kernel from which on a PID namespace has a bound of its own; before, a write there is the machine's."""


@dataclass(frozen=True)
class Means:
    """What this kernel lets this user have. `landlock`: the version of its interface, 0 for none."""

    filters: bool
    namespaces: bool
    landlock: int

    def __str__(self) -> str:
        files = f"Landlock {self.landlock}" if self.landlock else "nothing else"
        return f"{'filters' if self.filters else 'no filters'}, {'namespaces' if self.namespaces else files}"


def not_sure(limits: Limits, means: Means) -> list[str]:
    """In words, what calls with `limits` cannot be held to by `means`. Pure."""
    lacking = []
    if not means.filters:
        lacking.append("kernel interfaces, processes, memory: system calls cannot be filtered on this machine")
    if not means.namespaces:
        if not means.landlock:
            lacking.append("files: user namespaces are refused here, and this kernel has no Landlock")
        if limits.processes:
            lacking.append("processes can outlive their call, and signal others: user namespaces are refused here")
    return lacking


def try_means(limits: Limits, files: Files) -> Means:
    """Each is tried in a child, as the worker will have it."""
    if not kernel.is_known_machine():
        return Means(filters=False, namespaces=False, landlock=0)

    def namespaces() -> None:
        _enter_namespaces(limits)
        _go_on_in_child()
        separate_mounts()
        enter_view(_view(files))
        inner = kernel.fork_into_new_pid_namespace(_own_pid_namespace())
        if inner == 0:
            os._exit(0)
        os.waitpid(inner, 0)

    return Means(
        filters=_succeeds(lambda: kernel.install_filter(worker_program())),
        namespaces=_succeeds(namespaces),
        landlock=kernel.landlock_version(),
    )


def _succeeds(trial: Callable[[], None]) -> bool:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with contextlib.suppress(BaseException):
        trial()
        os._exit(0)
    os._exit(1)


class Confinement:
    """Of a worker: `begin`, import, `close_off`; and of each call: `fork`, `confine_call`, `filter_call`, `after_call`."""

    def __init__(self, limits: Limits, files: Files, means: Means) -> None:
        self._limits, self._files, self._means = limits, files, means
        self._own_files: OwnFiles | None = None
        self._own_namespace = -1
        self._rules: FileRules | None = None
        self._worker = 0

    def begin(self) -> None:
        """Before the function's module is imported. With namespaces it returns in a child, as which this process ends."""
        kernel.die_with_parent()
        if self._means.namespaces:
            _enter_namespaces(self._limits)
            _go_on_in_child()
            separate_mounts()
            # What is imported finds itself in /proc by the number that it has here.
            with contextlib.suppress(OSError):
                kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        self._worker = os.getpid()
        _bound(resource.RLIMIT_AS, self._limits.memory_mib << 20)
        _bound(resource.RLIMIT_CORE, 0)
        _bound(resource.RLIMIT_FSIZE, _FILE_BYTES)
        _bound(resource.RLIMIT_NOFILE, _OPEN_FILES_OF_WORKER)

    def close_off(self) -> None:
        """After the import. Raises OSError, UsageError where a means fails that could be had a moment ago."""
        if not kernel.is_known_machine():
            return
        view = _view(self._files)
        if self._means.namespaces:
            self._own_namespace = _own_pid_namespace()
            self._own_files = enter_view(view)
            _enter_folder(self._files.folder)
        elif self._means.landlock:
            self._rules = FileRules(view, self._means.landlock, execute=self._limits.processes)
        kernel.set_dumpable(False)
        kept = (kernel.CAP_SYS_ADMIN, kernel.CAP_SYS_RESOURCE) if self._means.namespaces else ()
        kernel.keep_capabilities(*kept)
        if self._means.filters:
            kernel.install_filter(worker_program())

    def fork(self) -> int:
        """Like `os.fork`, for a call."""
        if self._own_files is None:
            return os.fork()
        return kernel.fork_into_new_pid_namespace(self._own_namespace)

    def usage_of(self, call: int) -> Usage:
        return Usage(call, self._limits.memory_mib, whole_namespace=self._own_files is not None)

    def confine_call(self) -> None:
        """Hold this process, a call's, to all but the filter and fewer open files; what the worker has open is needed."""
        if not kernel.is_known_machine():
            return
        seconds = math.ceil(self._limits.time_s) + 1
        _bound(resource.RLIMIT_CPU, seconds)
        _bound(resource.RLIMIT_SIGPENDING, _QUEUED_SIGNALS)
        _bound(resource.RLIMIT_MSGQUEUE, 0)
        if self._own_files is not None:
            _few_processes(self._own_files.proc)
            _scratch_is_temporary()
        else:
            self._die_with_worker()
        if self._rules is not None:
            self._rules.restrict()
        kernel.keep_capabilities()

    def filter_call(self) -> None:
        """The last thing before the function is called, with the worker's files closed."""
        _bound(resource.RLIMIT_NOFILE, _OPEN_FILES_OF_CALL)
        if self._means.filters:
            rules = CallRules(self._limits.processes, self._limits.network, alone=self._own_files is not None)
            kernel.install_filter(call_program(rules, os.getpid()))

    def after_call(self) -> None:
        """When no process of a call is left."""
        if self._own_files is not None:
            self._own_files.scratch.renew()

    def _die_with_worker(self) -> None:
        kernel.die_with_parent()
        if os.getppid() != self._worker:
            os._exit(1)


def _enter_namespaces(limits: Limits) -> None:
    network = 0 if limits.network else kernel.NEWNET
    kernel.unshare(kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWIPC | kernel.NEWUTS | network)


def _view(files: Files) -> View:
    wanted = [*wanted_by_python(files.folder), *(Path(each) for each in files.readable)]
    return view_of(wanted, [Path(each) for each in files.hidden])


def _own_pid_namespace() -> int:
    return os.open("/proc/self/ns/pid", os.O_RDONLY)


def _enter_folder(folder: str) -> None:
    # Not there where it is `/` or holds nothing that may be read.
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _few_processes(proc: int) -> None:
    # The one since Linux 6.14, the other for anybody but root.
    if _kernel_version() >= _OWN_PID_MAX:
        with contextlib.suppress(OSError):
            descriptor = os.open("sys/kernel/pid_max", os.O_WRONLY, dir_fd=proc)
            try:
                os.write(descriptor, str(_MOST_PIDS).encode())
            finally:
                os.close(descriptor)
    _bound(resource.RLIMIT_NPROC, _MOST_PIDS)


def _kernel_version() -> tuple[int, ...]:
    major, minor, *_ = os.uname().release.split(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _scratch_is_temporary() -> None:
    os.environ["TMPDIR"] = str(SCRATCH)
    # Where the module has asked for it already.
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None


def _go_on_in_child() -> None:
    """Return in a forked child; this process waits for it, then ends as it did."""
    watching, held = os.pipe()
    child = os.fork()
    if child:
        os.close(watching)
        _mirror(child, held)
    os.close(held)
    kernel.die_with_parent()
    os.set_blocking(watching, False)
    try:
        os.read(watching, 1)
        os._exit(1)  # The parent ended before the line above it took hold.
    except BlockingIOError:
        os.close(watching)


def _mirror(child: int, held: int) -> NoReturn:
    # The pipe end that tells the child of this process's life stays open until here; the service's lines do not.
    os.closerange(0, held)
    os.closerange(held + 1, _OPEN_FILES_OF_WORKER)
    kernel.set_dumpable(False)
    kernel.keep_capabilities()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def describe_end(exit_code: int) -> str:
    """How a call's process ended that has said nothing; `exit_code` as `os.waitstatus_to_exitcode` gives it."""
    if exit_code == 0:
        return "it ended without an outcome that can be read"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-exit_code).name}"
    return f"it ended by itself with exit code {exit_code}"


def _bound(what: int, most: int) -> None:
    """Lower a limit; one that is lower already stays."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
