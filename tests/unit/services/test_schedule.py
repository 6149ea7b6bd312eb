"""Learning-rate schedules: bounds, the warm-up, one slope of decay down to the floor, and what cannot be one."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.training.schedule import Schedule, ScheduleKind

DECAYING: list[ScheduleKind] = ["linear", "cosine", "wsd"]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any that decays."""
    steps = draw(st.integers(2, 400))
    kind, share = draw(st.sampled_from(DECAYING)), draw(st.floats(0.01, 1.0))
    latest = steps - max(1, round(share * steps)) if kind == "wsd" else steps - 1
    return Schedule(
        kind=kind,
        warmup_steps=draw(st.integers(0, latest)),
        steps=steps,
        decay_share=share,
        floor=draw(st.floats(0.0, 0.99)),
    )


def factors(schedule: Schedule) -> list[float]:
    assert schedule.steps is not None
    return [schedule.factor(step) for step in range(schedule.steps + 1)]


@given(schedules())
def test_every_step_of_the_run_moves_the_weights_and_its_end_is_the_floor(schedule: Schedule) -> None:
    found = factors(schedule)
    assert all(0.0 < factor <= 1.0 for factor in found[:-1])
    assert found[-1] == pytest.approx(schedule.floor, abs=1e-12)
    assert schedule.factor(len(found) + 7) == pytest.approx(schedule.floor, abs=1e-12)


@given(schedules())
def test_it_rises_in_the_warm_up_holds_and_then_falls(schedule: Schedule) -> None:
    found, begins = factors(schedule), schedule.decay_begins
    warm_up = found[: schedule.warmup_steps]
    assert warm_up == [(step + 1) / schedule.warmup_steps for step in range(len(warm_up))]
    assert set(found[schedule.warmup_steps : begins + 1]) == {1.0}
    assert all(later < earlier for earlier, later in pairwise(found[begins:]))
    assert begins >= schedule.warmup_steps


@given(schedules())
def test_no_step_jumps(schedule: Schedule) -> None:
    found, begins = factors(schedule), schedule.decay_begins
    # A half cosine is at its steepest half-way: π/2 times as steep as a line.
    slope = (math.pi / 2 if schedule.kind == "cosine" else 1.0) * (1 - schedule.floor) / (len(found) - 1 - begins)
    assert all(earlier - later <= slope + 1e-9 for earlier, later in pairwise(found[begins:]))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.939711, 0.775, 0.55, 0.325, 0.160289]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55]),
    ],
)
def test_the_factors_of_a_run_of_eight_steps(kind: ScheduleKind, expected: list[float]) -> None:
    schedule = Schedule(kind=kind, warmup_steps=2, steps=8, decay_share=0.25, floor=0.1)
    assert factors(schedule)[:-1] == pytest.approx(expected, abs=1e-6)


def test_a_constant_rate_needs_no_length_and_has_no_end() -> None:
    assert [Schedule(warmup_steps=4).factor(step) for step in (0, 1, 3, 4, 10**6)] == [0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", DECAYING)
def test_a_decay_without_a_length_or_without_steps_is_refused(kind: ScheduleKind) -> None:
    with pytest.raises(ValueError, match="needs the run's number of steps"):
        Schedule(kind=kind)
    with pytest.raises(ValueError, match="cannot decay from step"):
        Schedule(kind=kind, warmup_steps=9, steps=9)
