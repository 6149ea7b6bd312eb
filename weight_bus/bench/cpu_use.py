"""How much of the machine others took while something was measured: a bad hour looks like a bad figure."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

_IDLE = ("idle", "iowait", "guest", "guest_nice")
"""Not work, or counted already as a user's."""


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds until a moment: of all, and of this process with all that it started. `all_s` holds stolen time, too."""

    at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> CpuUse:
        times = psutil.cpu_times()._asdict()
        return cls(time.monotonic(), sum(v for name, v in times.items() if name not in _IDLE), _own())

    def others_since(self, before: CpuUse) -> float:
        """Cores that others kept busy, in the mean."""
        others = (self.all_s - before.all_s) - (self.own_s - before.own_s)
        return max(0.0, others) / max(self.at - before.at, 1e-9)


def _own() -> float:
    me = psutil.Process()
    spent = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # With those of its children that have ended.
        spent += times.user + times.system + times.children_user + times.children_system
    return spent
