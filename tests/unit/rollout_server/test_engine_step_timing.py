"""The stall of a commit, from times alone."""

from __future__ import annotations

import pytest

from rollout_server.engines.step_timing import StepTiming
from services.policies.stall import WINDOW

STEP_S = 0.002


def run(timing: StepTiming, start_s: float, steps: int, gap_s: float = STEP_S) -> float:
    """`steps` steps, the first at `start_s`; returns when the next is due."""
    for number in range(steps):
        timing.step(start_s + number * gap_s, tokens=4)
    return start_s + steps * gap_s


def test_a_commit_that_holds_decoding_up_is_a_stall_of_the_surplus() -> None:
    timing = StepTiming()
    due = run(timing, 0.0, 50)
    timing.commit()
    run(timing, due + 0.030, 50)
    assert timing.stalls_ms() == pytest.approx([30.0])


def test_a_commit_that_nobody_notices_stalls_nothing() -> None:
    timing = StepTiming()
    due = run(timing, 0.0, 50)
    timing.commit()
    run(timing, due, 50)
    assert timing.stalls_ms() == pytest.approx([0.0], abs=1e-9)


def test_a_slow_step_near_the_commit_counts_and_a_far_one_does_not() -> None:
    for distance, expected in ((WINDOW - 1, 5.0), (WINDOW + 1, 0.0)):
        timing = StepTiming()
        due = run(timing, 0.0, 100)
        due = run(timing, due + 0.005, distance)
        timing.commit()
        run(timing, due, 100)
        assert timing.stalls_ms() == pytest.approx([expected], abs=1e-6)


def test_commits_close_together_each_have_their_stall_and_disturbed_gaps_stay_out_of_the_median() -> None:
    timing = StepTiming()
    due = run(timing, 0.0, 100)
    for _ in range(20):
        timing.commit()
        due = run(timing, due + 0.010, 3)
    run(timing, due, 100)
    assert timing.stalls_ms() == pytest.approx([10.0] * 20)


def test_idle_time_is_no_stall() -> None:
    timing = StepTiming()
    due = run(timing, 0.0, 50)
    timing.break_off()
    timing.commit()
    run(timing, due + 60.0, 50)
    assert timing.stalls_ms() == []
    assert timing.commits == 1


def test_a_burst_that_ends_inside_the_window_still_gives_the_stall() -> None:
    timing = StepTiming()
    due = run(timing, 0.0, 20)
    timing.break_off()
    due = run(timing, due + 1.0, 5)
    timing.commit()
    run(timing, due + 0.004, 1)
    assert timing.stalls_ms() == []
    timing.break_off()
    assert timing.stalls_ms() == pytest.approx([4.0])


def test_a_commit_after_the_last_step_of_a_stretch_gives_no_stall() -> None:
    timing = StepTiming()
    run(timing, 0.0, 20)
    timing.commit()
    timing.break_off()
    assert timing.stalls_ms() == []


def test_memory_is_bounded() -> None:
    timing = StepTiming()
    due = 0.0
    for _ in range(3000):
        due = run(timing, due, WINDOW + 2)
        timing.commit()
    assert len(timing.stalls_ms()) == 1024
    assert timing.tokens == 3000 * (WINDOW + 2) * 4
