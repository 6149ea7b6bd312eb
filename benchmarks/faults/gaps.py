"""What a fault costs: the longest gap between two optimizer steps after it, less the median gap of the run.

    steps    │ │ │ │ │            │ │ │ │ │ │ │
                     ▲ ◄── gap ──►
                     fault                        the next fault, or the end

A fault may show late (the trainer has batches left when their sources die), so all gaps up to the next fault count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise


def median_gap(steps: Sequence[float]) -> float:
    """Seconds between two steps, the median. `steps`: Unix seconds, in order. Raises ValueError for less than two."""
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps have no gap")
    return statistics.median(after - before for before, after in pairwise(steps))


def excesses(steps: Sequence[float], faults: Sequence[float]) -> list[float]:
    """Seconds that each fault added to the longest gap after it. `faults`: Unix seconds, in order.

    Raises ValueError for a fault that no step followed before the next one.
    """
    usual = median_gap(steps)
    ends = [*faults[1:], float("inf")]
    found = []
    for fault, end in zip(faults, ends, strict=True):
        gaps = [after - before for before, after in pairwise(steps) if after > fault and before < end]
        if not gaps:
            raise ValueError(f"no step followed the fault at {fault:.3f}")
        found.append(max(gaps) - usual)
    return found
