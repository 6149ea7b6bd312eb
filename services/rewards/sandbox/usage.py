"""What a call takes that no limit of one process counts: its threads, and the memory of all its processes together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.policies.rewards import RewardFailure
from services.rewards.sandbox.protocol import Failed

LOOK_EVERY_S = 0.05
"""A call may pass the limits between two looks."""
MOST_THREADS = 301
"""Of all processes of a call together. The kernel takes no smaller bound for a PID namespace."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Taken:
    """Of one process. `resident`: bytes, those that it shares included."""

    pid: int
    threads: int
    resident: int


class Usage:
    """Looks at a call. `whole_namespace`: /proc has the worker as process 1 and else only its call's processes."""

    def __init__(self, call: int, memory_mib: int, *, whole_namespace: bool) -> None:
        self._call, self._memory = call, memory_mib << 20
        self._whole = whole_namespace

    def too_much(self) -> Failed | None:
        """None, too, for a call that has ended."""
        taken = list(self._look())
        if sum(each.threads for each in taken) > MOST_THREADS:
            return Failed(RewardFailure.MEMORY, f"it ran more than {MOST_THREADS} threads")
        # One process is held to it by the kernel.
        several = len(taken) > 1 and sum(each.resident for each in taken) > self._memory
        if several and sum(_share(each.pid) for each in taken) > self._memory:
            return Failed(RewardFailure.MEMORY, f"its processes took more than {self._memory >> 20} MiB together")
        return None

    def _look(self) -> Iterator[Taken]:
        for pid in self._processes():
            with suppress(OSError, ValueError, IndexError):
                yield read_stat(pid, _read(f"/proc/{pid}/stat"))

    def _processes(self) -> Iterable[int]:
        if not self._whole:
            return (self._call,)
        with suppress(OSError):
            names = (each.name for each in Path("/proc").iterdir())
            return [int(name) for name in names if name.isdigit() and name != "1"]
        return ()


def read_stat(pid: int, text: bytes) -> Taken:
    """`/proc/<pid>/stat`, in which the name, in brackets, may hold anything. Raises ValueError, IndexError."""
    fields = text[text.rindex(b")") + 2 :].split()
    return Taken(pid, threads=int(fields[17]), resident=int(fields[21]) * _PAGE)


def _share(pid: int) -> int:
    """Bytes, of shared pages this process's share."""
    with suppress(OSError):
        for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 14)
    finally:
        os.close(descriptor)
