"""How the faults benchmark judges a fault."""

from __future__ import annotations

import pytest

from benchmarks.faults.run import excesses, median_gap


def test_a_fault_costs_the_longest_gap_after_it_less_the_median_one() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0]
    assert median_gap(steps) == 1.0
    assert excesses(steps, [3.5]) == [4.0]


def test_a_gap_that_opens_late_counts_for_the_fault_before_it() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0, 11.0, 12.0, 13.0]
    assert excesses(steps, [1.5, 9.5]) == [4.0, 0.0]


def test_the_gap_in_which_a_fault_falls_is_not_the_one_befores() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0]
    assert excesses(steps, [0.5, 4.5]) == [0.0, 4.0]


def test_a_fault_that_ends_the_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step followed"):
        excesses([0.0, 1.0, 2.0], [2.5])
    with pytest.raises(ValueError, match="no gap"):
        median_gap([1.0])
