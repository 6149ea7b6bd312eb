"""Threads that must not cost decoding more than they have to: those that stage and hash weights.

What they do runs without the interpreter lock, in pieces. Between pieces they rest: also on a core of their own they share
the memory's bandwidth, and decoding lives on that. They keep the usual priority. With a lower one, on a machine without an
idle core, a stage was seen to take minutes (not measured in turns): it could run out of time, and whoever holds the
interpreter lock while it waits for a core holds up decoding, too.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from threadpoolctl import threadpool_limits

_WORK_S = 0.002
"""Worked for less than this, nobody rests."""
BESIDE_DECODING = 0.5
"""The share of a core that staging takes where weights are decoded from the memory that it writes to."""
_SETTLE_S = 0.1


def background_threads(name: str) -> ThreadPoolExecutor:
    """Two threads: a newer version must be able to supersede one whose staging is under way. Each works on one core."""
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix=name, initializer=_stay_on_one_core)


def _stay_on_one_core() -> None:
    """OpenMP gives every thread a team as wide as the machine, of its own; it would push the decoding one off its cores.

    How many threads an engine was told to use is known to torch only, and packing (oneDNN, in vLLM) does not ask torch.
    """
    # Once in each thread, at its first parallel work, torch sets what it was told: let that be over.
    torch.get_num_threads()
    threadpool_limits(limits=1, user_api="openmp")


class CpuThrottle:
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

    def settle(self, worked_s: float) -> None:
        """Wait, once long work is over, until the decode steps that it made longer are over, too.

        A commit that followed at once would add its own to one of those, and readers would see both as one gap. Nobody
        waits where nothing is shared.
        """
        if self._rest_per_work and worked_s >= _SETTLE_S:
            time.sleep(_SETTLE_S)
