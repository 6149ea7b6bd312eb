"""Threads that must not cost decoding more than they have to: those that stage and hash weights.

On Linux each takes a lower priority of its own (`setpriority` counts threads): beside a decode thread that wants the same
core it gets little, on a core of its own all. What they do runs without the interpreter lock, in pieces.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_NICE = 10


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
