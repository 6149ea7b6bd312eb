"""What a call takes that no limit of one process counts: its processes and threads, and the memory of all together."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from services.policies.rewards import RewardFailure
from services.rewards.sandbox.protocol import Failed

LOOK_EVERY_S = 0.05
"""A call may pass the limits between two looks."""
MOST_THREADS = 256
"""Of all processes of a call together."""


@dataclass(frozen=True)
class Taken:
    """Of one process. `memory`: bytes in memory that are no file's, what it shares with others of the call included."""

    threads: int
    memory: int


class Usage:
    """Looks at a call. `whole_namespace`: /proc has the worker as process 1 and else only its call's processes.

    Only files are read that the kernel makes without waiting: a process can hold up whoever asks for its maps.
    """

    def __init__(self, call: int, memory_mib: int, *, whole_namespace: bool) -> None:
        self._call, self._memory_mib = call, memory_mib
        self._whole = whole_namespace

    def too_much(self, until: float) -> Failed | None:
        """None, too, for a call that has ended, and where looking takes until the monotonic time `until`."""
        processes, taken = self._processes(), []
        # Known at once, and a call that only ever starts others leaves little time to look further.
        if len(processes) > MOST_THREADS:
            return _too_many()
        for pid in processes:
            if time.monotonic() >= until:
                return None
            with suppress(OSError, ValueError):
                taken.append(read_status(_read(f"/proc/{pid}/status")))
        if sum(each.threads for each in taken) > MOST_THREADS:
            return _too_many()
        # One process alone is held to it by the kernel.
        if len(taken) > 1 and sum(each.memory for each in taken) > self._memory_mib << 20:
            return Failed(RewardFailure.MEMORY, f"its processes took more than {self._memory_mib} MiB together")
        return None

    def _processes(self) -> list[int]:
        if not self._whole:
            return [self._call]
        with suppress(OSError), os.scandir("/proc") as entries:
            return [int(each.name) for each in entries if each.name.isdigit() and each.name != "1"]
        return []


def read_status(text: bytes) -> Taken:
    """`/proc/<pid>/status`; a process that has ended has no memory there. Raises ValueError."""
    fields = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
    kibibytes = sum(int(fields.get(name, b"0 kB").split()[0]) for name in (b"RssAnon", b"RssShmem"))
    return Taken(int(fields.get(b"Threads", b"0")), kibibytes << 10)


def _too_many() -> Failed:
    return Failed(RewardFailure.MEMORY, f"it ran more than {MOST_THREADS} processes and threads")


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 14)
    finally:
        os.close(descriptor)
