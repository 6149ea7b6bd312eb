"""Staleness: how old a token is, and what K does about it."""

from __future__ import annotations

import pytest

from services.policies.staleness import FutureVersionError, staleness, window


def test_staleness_counts_optimizer_steps() -> None:
    assert staleness(7, 5) == 2


def test_a_token_from_the_future_is_an_error() -> None:
    with pytest.raises(FutureVersionError, match="version 8 reached a trainer at version 7"):
        staleness(7, 8)


def test_the_window_judges_each_span_by_itself() -> None:
    judged = window([(3, 2, 4), (5, 1, 6)], policy_version=7, k=2)
    assert [(span.start, span.length, span.staleness, span.fresh) for span in judged] == [
        (3, 2, 3, False),
        (5, 1, 1, True),
    ]


@pytest.mark.parametrize(("version", "k", "fresh"), [(5, 2, True), (4, 2, False), (7, 0, True), (6, 0, False)])
def test_the_bound_is_k_itself(version: int, k: int, fresh: bool) -> None:
    assert [span.fresh for span in window([(0, 1, version)], policy_version=7, k=k)] == [fresh]
