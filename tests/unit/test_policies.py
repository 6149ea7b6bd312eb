"""Staleness and admission: the bound holds under any schedule."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policies.admission import admission_limit, may_open
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


def test_k_zero_is_exactly_synchronous() -> None:
    """The next batch is admitted only by an engine that serves the step before."""
    assert may_open(opened=3, dropped=0, engine_version=0, base_version=0, k=0, batch=4)
    assert not may_open(opened=4, dropped=0, engine_version=0, base_version=0, k=0, batch=4)
    assert may_open(opened=4, dropped=0, engine_version=1, base_version=0, k=0, batch=4)


def test_a_resumed_run_counts_from_its_base_version() -> None:
    assert admission_limit(engine_version=40, base_version=40, k=2, batch=16) == 48


@pytest.mark.parametrize(("k", "batch"), [(-1, 4), (0, 0)])
def test_nonsense_is_refused(k: int, batch: int) -> None:
    with pytest.raises(ValueError, match="K must be"):
        admission_limit(0, 0, k, batch)


@settings(max_examples=300, deadline=None)
@given(
    k=st.integers(0, 4),
    batch=st.integers(1, 5),
    choices=st.lists(st.tuples(st.sampled_from(["open", "finish", "step", "commit", "drop"]), st.integers(0, 10**6))),
)
def test_under_any_schedule_first_in_first_out_never_exceeds_k(
    k: int, batch: int, choices: list[tuple[str, int]]
) -> None:
    """Groups opened under an engine's version, finished in any order but consumed in order of opening: no token over K,
    never more than (K + 1) · batch open, and drops never let the bound slip."""
    trainer = engine = opened = dropped = 0
    open_groups: deque[list[int]] = deque()  # [version at start, finished], oldest first
    for action, pick in choices:
        if action == "open" and may_open(opened, dropped, engine, 0, k, batch):
            opened += 1
            open_groups.append([engine, 0])
        elif action == "finish" and open_groups:
            open_groups[pick % len(open_groups)][1] = 1
        elif action == "drop" and open_groups:
            del open_groups[pick % len(open_groups)]
            dropped += 1
        elif action == "step" and len(open_groups) >= batch and all(done for _, done in list(open_groups)[:batch]):
            for _ in range(batch):
                version, _ = open_groups.popleft()
                assert staleness(trainer, version) <= k
            trainer += 1
        elif action == "commit":
            engine = min(trainer, engine + 1 + pick % 3)
        assert len(open_groups) <= (k + 1) * batch
