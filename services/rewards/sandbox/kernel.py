"""Linux calls that Python's standard library lacks: namespaces, mounts, capabilities, seccomp, Landlock.

Each raises OSError with what the kernel said. Nothing here decides anything. Only x86-64 and ARM64 have numbers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import struct
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 21, 24

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_AMBIENT, _CLEAR_ALL = 47, 4
_FILTER_MODE = 2
_MNT_DETACH = 2
_AT_RECURSIVE, _AT_FDCWD, _ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 0x8000, -100, 1, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522
_RULE_PATH_BENEATH = 1
# pivot_root, by machine; the others have one number everywhere.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446


def is_known_machine() -> bool:
    """Whether the calls of this module can be made at all."""
    return sys.platform == "linux" and platform.machine() in _PIVOT_ROOT


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(returned: int, what: str) -> int:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return returned


def _syscall(what: str, number: int, *arguments: object) -> int:
    return _checked(int(_libc().syscall(ctypes.c_long(number), *arguments)), what)


def _prctl(what: str, option: int, *arguments: object) -> None:
    unused = [ctypes.c_ulong(0)] * (4 - len(arguments))
    _checked(int(_libc().prctl(ctypes.c_int(option), *arguments, *unused)), what)


def unshare(flags: int) -> None:
    """Leave namespaces for new ones. In a new user namespace this process stays who it is; no other id exists there."""
    user, group = os.geteuid(), os.getegid()
    _checked(int(_libc().unshare(ctypes.c_int(flags))), "unshare")
    if flags & NEWUSER:
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            descriptor = os.open(f"/proc/self/{file}", os.O_WRONLY)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)


def fork_into_new_pid_namespace(own: int) -> int:
    """Like `os.fork`; the child is the first process of a PID namespace, with whose end all others in it are killed.

    `own`: a descriptor of this process's PID namespace, in which it must be privileged.
    """
    unshare(NEWPID)
    child = -1
    try:
        child = os.fork()
    finally:
        if child != 0:
            _checked(int(_libc().setns(ctypes.c_int(own), ctypes.c_int(NEWPID))), "setns")
    return child


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if each is None else os.fsencode(each) for each in (source, target, kind, data)]
    returned = _libc().mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _checked(int(returned), f"mount {kind or ''} {target}")


def detach(target: str) -> None:
    """Unmount lazily, with all that is mounted below."""
    _checked(int(_libc().umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH))), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _syscall("pivot_root", _PIVOT_ROOT[platform.machine()], os.fsencode(new), os.fsencode(old))


def make_read_only(target: str, *, devices: bool = False) -> None:
    """A mount with all below it: no writing, no set-user-id programs, no devices (mount_setattr, from Linux 5.12)."""
    set_ = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    attributes = struct.pack("=QQQQ", set_, 0, 0, 0)
    _syscall(
        f"mount_setattr {target}",
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )


def keep_capabilities(*kept: int) -> None:
    """Give up all capabilities of this thread but these, for good."""
    mask = sum(1 << each for each in kept)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable; all that is kept is in the lower half.
    data = struct.pack("=IIIIII", mask, mask, 0, 0, 0, 0)
    _prctl("PR_CAP_AMBIENT", _AMBIENT, ctypes.c_ulong(_CLEAR_ALL))
    _checked(int(_libc().capset(header, data)), "capset")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A parent that has ended already is not noticed."""
    if sys.platform == "linux":
        _prctl("PR_SET_PDEATHSIG", _SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def set_dumpable(dumpable: bool) -> None:
    """Whether processes of the same user may look into this one and change it (ptrace, /proc/…/mem)."""
    _prctl("PR_SET_DUMPABLE", _SET_DUMPABLE, ctypes.c_ulong(dumpable))


def refuse_new_privileges() -> None:
    """No program that this process starts gets more rights than it has."""
    _prctl("PR_SET_NO_NEW_PRIVS", _SET_NO_NEW_PRIVS, ctypes.c_ulong(1))


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """Hold this thread, and what it forks, to a seccomp program (`struct sock_filter[]`), for good."""
    refuse_new_privileges()
    whole = _Program(len(program) // 8, program)
    _prctl("PR_SET_SECCOMP", _SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), ctypes.byref(whole))


def landlock_version() -> int:
    """The version of Landlock's interface; 0 where there is none."""
    try:
        return _syscall("landlock", _LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def landlock_ruleset(attributes: bytes) -> int:
    """A descriptor of a set without rules. `attributes`: `struct landlock_ruleset_attr`."""
    return _syscall(
        "landlock_create_ruleset", _LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )


def landlock_allow(ruleset: int, access: int, path: int) -> None:
    """Allow `access` to what the descriptor `path` names, and to all below it."""
    rule = struct.pack("=Qi", access, path)
    _syscall(
        "landlock_add_rule",
        _LANDLOCK_ADD,
        ctypes.c_int(ruleset),
        ctypes.c_int(_RULE_PATH_BENEATH),
        rule,
        ctypes.c_uint(0),
    )


def landlock_restrict(ruleset: int) -> None:
    """Hold this thread, and what it forks, to the rules, for good."""
    refuse_new_privileges()
    _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
