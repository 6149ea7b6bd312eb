"""The rule of a stall: whatever the gaps, it is what the longest one has more than usual."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.stall import stall

gaps = st.lists(st.integers(0, 10**6).map(float), min_size=1, max_size=40)


@given(gaps, gaps)
def test_a_stall_is_the_longest_gap_less_a_usual_one(window: list[float], undisturbed: list[float]) -> None:
    found = stall(window, undisturbed)
    assert 0.0 <= found <= max(window)
    assert found + max(undisturbed) >= max(window)
    assert stall(window[::-1], undisturbed[::-1]) == found
    assert stall([*window, max(window) + 1.0], undisturbed) >= found


def test_one_odd_gap_among_the_usual_ones_changes_nothing() -> None:
    assert stall([10.0, 30.0, 10.0], [10.0, 10.0, 500.0]) == 20.0
    assert stall([10.0], [10.0, 12.0, 12.0]) == 0.0


@pytest.mark.parametrize(("window", "undisturbed"), [([], [1.0]), ([1.0], [])])
def test_without_gaps_there_is_no_stall_to_tell(window: list[float], undisturbed: list[float]) -> None:
    with pytest.raises(ValueError, match="needs gaps"):
        stall(window, undisturbed)
