"""What `rollmesh bench loop` reads off a run: seconds to 0.9 success and steps a second. Pure.

Both arms are judged alike: time counts from the moment the first training group's generation begins, and success is the
mean over a trailing window of batches, so that one lucky batch decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 3
BAR = 0.9


@dataclass(frozen=True)
class StepMark:
    """An optimizer step: when it ended (Unix seconds) and the success of the batch it consumed."""

    time: float
    success: float


@dataclass(frozen=True)
class LoopTiming:
    time_to_bar_s: float | None
    """Seconds from the start to the first step whose trailing mean success is ≥ BAR; None if never."""
    steps_per_s: float


def time_loop(started: float, steps: Sequence[StepMark]) -> LoopTiming:
    """Judge one arm. Raises ValueError for an arm that made no step."""
    if not steps:
        raise ValueError("an arm that made no step cannot be timed")
    reached = None
    for index in range(WINDOW - 1, len(steps)):
        if sum(step.success for step in steps[index - WINDOW + 1 : index + 1]) / WINDOW >= BAR:
            reached = steps[index].time - started
            break
    return LoopTiming(time_to_bar_s=reached, steps_per_s=len(steps) / (steps[-1].time - started))
