"""Seccomp filters of the worker and of a call: which system calls are refused, as a classic BPF program.

    another architecture's call           ──► killed
    a call newer than the list            ──► ENOSYS
    kernel interfaces that nobody needs   ──► EPERM     memory of others, keyrings, bpf, io_uring, clocks, modules, …
    memory that no limit counts           ──► EPERM     memfd_create, System V IPC, message queues
    mounts, namespaces                    ──► EPERM     in calls; the worker makes them
    fork, vfork, clone of a process       ──► EPERM     unless the function may start processes; threads may always
    clone3                                ──► ENOSYS: the C library then calls clone, whose flags can be seen
    socket                                ──► EPERM     but IPv4 and IPv6 where it may use the network; socketpair is free
    signals and limits of others, modes   ──► EPERM     where there is no namespace

The program is made of `struct sock_filter` (linux/filter.h) over `struct seccomp_data` (linux/seccomp.h).
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_LOAD, _AND, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers on x86-64 and ARM64; None where it does not exist. From 424 on they are the same.
OLDER: Mapping[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chmod": (90, None),
    "chown": (92, None),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "delete_module": (176, 106),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, None),
    "init_module": (175, 105),
    "ioctl": (16, 29),
    "ioperm": (173, None),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lchown": (94, None),
    "lookup_dcookie": (212, 18),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open": (2, None),
    "open_by_handle_at": (304, 265),
    "openat": (257, 56),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "removexattr": (197, 14),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semctl": (66, 191),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "setxattr": (188, 5),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "truncate": (76, 45),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "uselib": (134, None),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
NEWER: Mapping[str, int] = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "openat2": 437,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
_NEWEST = 469

_NEVER = (
    # Memory and descriptors of other processes.
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd"),
    *("migrate_pages", "move_pages"),
    # Memory that no address space counts, and that stays when a call has ended.
    *("memfd_create", "memfd_secret", "shmget", "shmat", "shmctl", "semget", "semctl", "msgget", "msgctl"),
    *("mq_open", "mq_unlink", "vmsplice"),
    # Keyrings, and interfaces to the kernel.
    *("keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd", "fanotify_init"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "reboot", "syslog", "acct"),
    *("swapon", "swapoff", "quotactl", "quotactl_fd", "iopl", "ioperm", "modify_ldt", "vhangup", "uselib"),
    *("nfsservctl", "lookup_dcookie", "open_by_handle_at", "name_to_handle_at"),
    # The machine's clock and names.
    *("settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname", "setdomainname"),
)
_WORKERS_OWN = (
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_tree", "open_tree_attr", "move_mount"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    # Of this user's other processes too.
    *("setpriority", "ioprio_set"),
)
_OF_FILES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "truncate"),
    *("utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat", "file_setattr"),
)
_OF_NUMBERS = ("pidfd_open", "pidfd_send_signal", "tkill")
_SELF_OR_ZERO = (
    *("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "setpgid"),
)
_SELF = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")

_CLONE_THREAD, _NEW_NAMESPACES = 0x00010000, 0x7E020000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE = 8, 10, 15, 1024
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902
_SETFLAGS, _FSSETXATTR = 0x40086602, 0x401C5820
_SET_PDEATHSIG, _SET_PTRACER, _SET_DUMPABLE = 1, 0x59616D61, 4
_O_ACCMODE, _O_TRUNC = 3, 0o1000


@dataclass(frozen=True)
class CallRules:
    """`alone`: the call has process and mount namespaces of its own; else `own_pid` is all that it may name."""

    processes: bool
    network: bool
    alone: bool


def worker_program() -> bytes:
    """What a worker is held to between its calls; its calls inherit it."""
    return _program(_refused(_NEVER) + _clone_without(deny_processes=False))


def call_program(rules: CallRules, own_pid: int) -> bytes:
    """What one call is held to. `own_pid`: its process."""
    body = _refused((*_NEVER, *_WORKERS_OWN))
    body += _clone_without(deny_processes=not rules.processes)
    if not rules.processes:
        body += _refused(("fork", "vfork", "execve", "execveat"))
    body += _sockets(network=rules.network)
    body += _call(
        "fcntl", _unless_equal(1, (_F_SETLEASE, *(() if rules.alone else (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX))))
    )
    body += _call("ioctl", _unless_equal(1, (_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP, _SETFLAGS, _FSSETXATTR)))
    if not rules.alone:
        body += _refused((*_OF_FILES, *_OF_NUMBERS))
        body += _call("openat2", [_return(_ERRNO | errno.ENOSYS)])
        for name, flags in (("open", 1), ("openat", 2)):
            body += _call(name, _unless_truncating_a_read(flags))
        for name in _SELF_OR_ZERO:
            body += _call(name, _only_equal(0, (0, own_pid)))
        for name in _SELF:
            body += _call(name, _only_equal(0, (own_pid,)))
        body += _call("prctl", _unless_equal(0, (_SET_PDEATHSIG, _SET_PTRACER, _SET_DUMPABLE)))
    return _program(body)


def _program(body: list[bytes]) -> bytes:
    machine = platform.machine()
    begin = [
        _load(_ARCHITECTURE),
        _test(_EQUAL, _AUDIT[machine], 1, 0),
        _return(_KILL),
        _load(_NUMBER),
    ]
    if machine == "x86_64":
        begin += [_test(_AT_LEAST, _X32, 0, 1), _return(_KILL)]
    begin += [_test(_AT_LEAST, _NEWEST + 1, 0, 1), _return(_ERRNO | errno.ENOSYS)]
    return b"".join([*begin, *body, _return(_ALLOW)])


def _refused(names: Iterable[str]) -> list[bytes]:
    return [piece for name in names for piece in _call(name, [_return(_ERRNO | errno.EPERM)])]


def _clone_without(*, deny_processes: bool) -> list[bytes]:
    body = _unless_any_bit(0, _NEW_NAMESPACES)
    if deny_processes:
        # The last instruction allows: a thread, then, or nothing.
        body = [*body[:-1], _test(_ANY_BIT, _CLONE_THREAD, 1, 0), _return(_ERRNO | errno.EPERM), body[-1]]
    return _call("clone", body) + _call("clone3", [_return(_ERRNO | errno.ENOSYS)])


def _sockets(*, network: bool) -> list[bytes]:
    pairs = _call("socketpair", _only_equal(0, (_AF_UNIX,)))
    if not network:
        return pairs + _call("socket", [_return(_ERRNO | errno.EPERM)])
    # Netlink's protocol 0 (routes) is how the C library learns which addresses this machine has.
    routes = [
        _load_argument(0),
        _test(_EQUAL, _AF_NETLINK, 0, 2),
        _load_argument(2),
        _test(_EQUAL, 0, 2, 3),
        _test(_EQUAL, _AF_INET, 1, 0),
        _test(_EQUAL, _AF_INET6, 0, 1),
        _return(_ALLOW),
        _return(_ERRNO | errno.EPERM),
    ]
    return pairs + _call("socket", routes)


def _call(name: str, body: list[bytes]) -> list[bytes]:
    """`body` for one system call; it must end in a return whatever it tests."""
    number: int | None = NEWER.get(name)
    if number is None:
        number = OLDER[name][0 if platform.machine() == "x86_64" else 1]
    return [] if number is None else [_test(_EQUAL, number, 0, len(body)), *body]


def _unless_equal(argument: int, values: Iterable[int]) -> list[bytes]:
    refused = [piece for each in values for piece in (_test(_EQUAL, each, 0, 1), _return(_ERRNO | errno.EPERM))]
    return [_load_argument(argument), *refused, _return(_ALLOW)]


def _only_equal(argument: int, values: Iterable[int]) -> list[bytes]:
    allowed = [piece for each in values for piece in (_test(_EQUAL, each, 0, 1), _return(_ALLOW))]
    return [_load_argument(argument), *allowed, _return(_ERRNO | errno.EPERM)]


def _unless_any_bit(argument: int, bits: int) -> list[bytes]:
    return [_load_argument(argument), _test(_ANY_BIT, bits, 0, 1), _return(_ERRNO | errno.EPERM), _return(_ALLOW)]


def _unless_truncating_a_read(argument: int) -> list[bytes]:
    """What is opened for reading and emptied by that is no write to Landlock before its third version."""
    return [
        _load_argument(argument),
        _instruction(_AND, _O_ACCMODE | _O_TRUNC),
        _test(_EQUAL, _O_TRUNC, 0, 1),
        _return(_ERRNO | errno.EPERM),
        _return(_ALLOW),
    ]


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _load_argument(index: int) -> bytes:
    """The low half: all that the kernel looks at where an argument is an int."""
    return _load(_ARGUMENTS + 8 * index)


def _test(code: int, value: int, if_true: int, if_false: int) -> bytes:
    """The jumps count instructions to pass over."""
    return _instruction(code, value, if_true, if_false)


def _return(value: int) -> bytes:
    return _instruction(_RETURN, value)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
