"""CPU throttle and background threads for staging and hashing weights beside decoding.

Their work releases the interpreter lock and is done in pieces, with sleeps between: even on a core of their own they take
memory bandwidth from decoding. They keep the usual priority: with a lower one, on a machine without an idle core, a stage
was seen to take minutes (not measured), and a thread that waits for a core with the interpreter lock blocks decoding.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from threadpoolctl import threadpool_limits

_WORK_S = 0.002
"""No sleep after less work than this."""
BESIDE_DECODING = 0.5
"""The share of a core that staging takes where weights are decoded from the memory that it writes to."""
_SETTLE_AFTER_S = 0.05
"""CPU time of a stage from which on it has slowed decoding down: some ten megabytes on a CPU."""
_SETTLE_S = 0.1


def background_threads(name: str, count: int = 2) -> ThreadPoolExecutor:
    """Threads that each work on one core. Two, where a newer version must be able to supersede one that is being staged."""
    return ThreadPoolExecutor(max_workers=count, thread_name_prefix=name, initializer=_stay_on_one_core)


def _stay_on_one_core() -> None:
    """Limit OpenMP to one thread: by default each Python thread gets a team as wide as the machine, which would compete
    with decoding. Torch's own limit does not apply to packing (oneDNN, in vLLM).
    """
    # Torch applies its own setting once in each thread, at its first parallel work: do that first.
    torch.get_num_threads()
    threadpool_limits(limits=1, user_api="openmp")


class CpuThrottle:
    """Limits a thread to a share of one core: call `rest` between pieces. Time spent blocked does not count as work."""

    def __init__(self, share: float) -> None:
        self._rest_per_work = 1.0 / share - 1.0
        self._mark = time.thread_time()

    def rest(self) -> None:
        worked = time.thread_time() - self._mark
        if worked < _WORK_S or not self._rest_per_work:
            return
        time.sleep(worked * self._rest_per_work)
        self._mark = time.thread_time()

    def settle(self, worked_s: float) -> None:
        """Wait, after long work, until the decode steps that it slowed down are over. `worked_s`: CPU time.

        A commit right after it would make one of those steps even longer. No wait where decoding does not share the
        memory, nor after an update that is small, however long it waited for its bytes or for a core.
        """
        if self._rest_per_work and worked_s >= _SETTLE_AFTER_S:
            time.sleep(_SETTLE_S)
