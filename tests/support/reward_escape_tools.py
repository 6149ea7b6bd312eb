"""What escapes from the reward sandbox are written with: system calls by number, others' processes, attempts."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
MIB = 1 << 20
World = dict[str, Any]
"""What the test tells of the outside: numbers of processes, paths, ports."""


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
