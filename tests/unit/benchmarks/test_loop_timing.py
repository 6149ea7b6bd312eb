"""How the loop benchmark judges an arm."""

from __future__ import annotations

import pytest

from benchmarks.loop.run import StepMark, time_loop


def marks(*successes: float) -> list[StepMark]:
    return [StepMark(time=100.0 + index + 1, success=success) for index, success in enumerate(successes)]


def test_time_counts_to_the_first_step_whose_trailing_mean_reaches_the_bar() -> None:
    timing = time_loop(100.0, marks(0.2, 0.9, 0.9, 0.9, 1.0))
    assert timing.time_to_bar_s == 4.0
    assert timing.steps_per_s == 1.0


def test_one_lucky_batch_decides_nothing() -> None:
    assert time_loop(100.0, marks(0.2, 1.0, 0.3, 0.4)).time_to_bar_s is None


def test_an_arm_without_a_step_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step"):
        time_loop(0.0, [])
