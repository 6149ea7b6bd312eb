"""Deadlines of what grows with the model: from its bytes, the pace that was measured, and a least time. Pure.

| what                   | the least                 | grows by                                                          |
|------------------------|---------------------------|-------------------------------------------------------------------|
| a stage, a digest      | `weights.stage_timeout_s` | its bytes                                                         |
| an update              |                           | four stages and 5 s: staging, its repetitions, the barrier        |
| a batch                | `trainer.batch_timeout_s` | four times the longest wait for a batch so far                    |
| a checkpoint           | an hour                   | its bytes                                                         |
| a trainer's end        | `trainer.stop_timeout_s`  | four of its longest steps, and the bytes of a checkpoint          |
| an export              | an hour                   | the bytes of the checkpoint                                       |
| a turn of an episode   | two minutes               | its tokens, at two a second                                       |

Bytes count with 100 MB/s (10 s a GB), the pace of a slow disk or of 1 Gbit/s. Where a slower pace was measured, a deadline
is four times what that would take: whoever is late then is stuck, not slow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SLOWEST_PACE = 100e6
"""Bytes a second, where nothing was measured."""
SLOWEST_TOKENS = 2.0
"""Of one answer, a second."""
SLACK = 4.0
_REMEMBERED = 16


def within(least_s: float, nbytes: int, pace: float | None = None) -> float:
    """Seconds for work on so many bytes. `pace`: bytes a second, as measured; None: not yet."""
    assumed = nbytes / SLOWEST_PACE
    measured = 0.0 if pace is None else SLACK * nbytes / pace
    return max(least_s, assumed, measured)


def settled_within(stage_s: float) -> float:
    """For an update as a whole, where a stage has `stage_s`."""
    return 4 * stage_s + 5.0


def batch_within(least_s: float, longest_s: float) -> float:
    """`longest_s`: the longest wait for a batch so far."""
    return max(least_s, SLACK * longest_s)


def stopped_within(least_s: float, longest_step_s: float, checkpoint_bytes: int) -> float:
    """For a trainer to end its step and write a checkpoint. `longest_step_s`: of the steps so far; 0.0: none is known."""
    return least_s + SLACK * longest_step_s + checkpoint_bytes / SLOWEST_PACE


def answered_within(least_s: float, tokens: int) -> float:
    """For an answer of so many tokens at the most."""
    return least_s + tokens / SLOWEST_TOKENS


@dataclass
class Pace:
    """The slowest of the last 16 measurements."""

    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def note(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long. What took no time, or had no bytes, measures nothing."""
        if nbytes > 0 and seconds > 0:
            self._seen.append(nbytes / seconds)

    @property
    def slowest(self) -> float | None:
        """Bytes a second; None before the first measurement."""
        return min(self._seen, default=None)
