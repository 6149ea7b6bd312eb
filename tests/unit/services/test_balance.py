"""The balance of a run's account: what is durable decides, and a corrected account balances."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.policies.balance import BALANCED, Corrections, Counted, Durable, corrections


def counted(**changes: int) -> Counted:
    figures = {"published": 20, "trained": 12, "dropped": 2, "unsettled": 6, "opened_groups": 9, "closed_groups": 7}
    figures |= {"dropped_groups": 1, "open_groups": 2} | changes
    return Counted(**figures, standing=frozenset({"open", "half"}))


DURABLE = Durable(trained=12, consumed=5, consumed_lately=frozenset({"g4"}), held=frozenset({"half", "whole"}))


def test_an_account_that_agrees_with_what_is_durable_is_left_alone() -> None:
    assert corrections(counted(), DURABLE) == BALANCED
    assert not BALANCED


def test_what_redis_forgot_is_added_and_what_is_lost_counts_as_dropped() -> None:
    forgot = corrections(counted(trained=8, published=16, opened_groups=6, closed_groups=4), DURABLE)
    assert (forgot.trained, forgot.published, forgot.opened_groups, forgot.closed_groups) == (4, 4, 3, 3)
    assert forgot.unaccounted == 7
    lost = corrections(counted(opened_groups=11, closed_groups=9), DURABLE)
    assert (lost.dropped_groups, lost.opened_groups, lost.closed_groups) == (2, 0, 0)


names = st.frozensets(st.sampled_from("abcdefgh"), max_size=6)
few = st.integers(0, 40)


@given(few, few, few, few, few, few, few, names, names, names, few, few)
def test_a_corrected_account_balances_whatever_was_lost(
    published: int,
    trained: int,
    dropped: int,
    unsettled: int,
    opened: int,
    closed: int,
    dropped_groups: int,
    standing: frozenset[str],
    held: frozenset[str],
    lately: frozenset[str],
    known: int,
    consumed: int,
) -> None:
    before = Counted(
        published=published,
        trained=trained,
        dropped=dropped,
        unsettled=unsettled,
        opened_groups=opened,
        closed_groups=closed,
        dropped_groups=dropped_groups,
        open_groups=len(standing),
        standing=standing,
    )
    durable = Durable(trained=known, consumed=consumed, consumed_lately=lately, held=held)
    found = corrections(before, durable)
    after = replace(
        before,
        published=published + found.published,
        trained=trained + found.trained,
        opened_groups=opened + found.opened_groups,
        closed_groups=closed + found.closed_groups,
        dropped_groups=dropped_groups + found.dropped_groups,
    )
    assert corrections(after, durable) == BALANCED
    assert after.trained == known
    assert after.published == after.trained + after.dropped + after.unsettled
    assert after.opened_groups == after.closed_groups + after.open_groups
    assert found.opened_groups >= 0 and found.dropped_groups >= 0
    assert bool(found) == (found != Corrections())
