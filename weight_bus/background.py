"""Threads that must not cost decoding more than they have to: those that stage and hash weights.

On Linux each takes a lower priority of its own (`setpriority` counts threads): beside a decode thread that wants the same
core it gets little, on a core of its own all. What they do runs without the interpreter lock, in pieces. Between pieces
they rest: on a core of their own they still share the memory's bandwidth, and decoding lives on that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

_NICE = 10
_WORK_S = 0.002
"""Worked for less than this, nobody rests."""
BESIDE_DECODING = 0.5
"""The share of a core that staging takes where weights are decoded from the memory that it writes to."""


def background_threads(name: str) -> ThreadPoolExecutor:
    """Two threads: a newer version must be able to supersede one whose staging is under way."""
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix=name, initializer=yield_to_others)


def yield_to_others() -> None:
    """Lower the calling thread's priority, where the system knows that of a thread. It cannot be raised again."""
    if sys.platform != "linux":
        return
    # A sandbox may forbid it; the thread then runs as any other.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Pace:
    """Keeps a thread's work to a share of one core: call `rest` between pieces. Waiting for others is no work."""

    def __init__(self, share: float) -> None:
        self._rest_per_work = 1.0 / share - 1.0
        self._mark = time.thread_time()

    def rest(self) -> None:
        worked = time.thread_time() - self._mark
        if worked < _WORK_S or not self._rest_per_work:
            return
        time.sleep(worked * self._rest_per_work)
        self._mark = time.thread_time()
