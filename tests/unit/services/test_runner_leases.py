"""A runner's lease: who lives keeps its groups whatever else is away, who is gone loses them in time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.runner_leases import Gone, Heard, RunnerLeases
from tests.support.examples import examples

LEASE_S, LOOK_S = 10.0, 0.5
ME, OTHER = "env/0000aaaa", "env/1111bbbb"


@dataclass(frozen=True)
class Look:
    """One look: so long after the last, whether the runner was heard of in between, whether it could have been."""

    after_s: float
    heard: bool
    reachable: bool


looks = st.lists(
    st.builds(Look, after_s=st.sampled_from([0.0, LOOK_S, 0.7, 30.0]), heard=st.booleans(), reachable=st.booleans()),
    max_size=120,
)


def heard(mark: int, runner: str = ME, *, left: bool = False) -> dict[str, Heard]:
    name, _, incarnation = runner.rpartition("/")
    return {name: Heard(incarnation, mark, left)}


@examples(400)
@given(looks)
def test_it_is_gone_after_a_lease_of_silence_that_was_watched_and_not_before(schedule: list[Look]) -> None:
    leases = RunnerLeases(LEASE_S, 2 * LOOK_S)
    now, mark, silent_s = 0.0, 0, 0.0
    assert leases.look(now, [ME], heard(mark)) == {}
    for look in schedule:
        now += look.after_s
        mark += look.heard
        # An outage of Redis or of this server shows as a long pause: it counts as one look at most.
        silent_s = 0.0 if look.heard else silent_s + (min(look.after_s, 2 * LOOK_S) if look.reachable else 0.0)
        gone = leases.look(now, [ME], heard(mark), reachable=look.reachable)
        assert gone == ({ME: Gone.SILENT} if silent_s >= LEASE_S else {})


def test_a_name_that_nobody_has_is_a_runner_that_was_never_heard_of() -> None:
    leases = RunnerLeases(LEASE_S, 2 * LOOK_S)
    gone = [leases.look(number * LOOK_S, [ME], {}) for number in range(21)]
    assert gone[:-1] == [{}] * 20
    assert gone[-1] == {ME: Gone.SILENT}
    assert leases.look(11.0, [ME], heard(1)) == {}, "its record had been lost, not the runner"


def test_one_that_left_or_was_replaced_is_gone_at_once_and_its_successor_is_not() -> None:
    leases = RunnerLeases(LEASE_S, 2 * LOOK_S)
    assert leases.look(0.0, [ME, OTHER], heard(1, OTHER)) == {ME: Gone.REPLACED}
    assert leases.look(0.1, [OTHER], heard(2, OTHER, left=True)) == {OTHER: Gone.LEFT}


def test_one_whose_groups_come_back_has_a_whole_lease_again() -> None:
    leases = RunnerLeases(LEASE_S, 2 * LOOK_S)
    for number in range(18):
        assert leases.look(number * LOOK_S, [ME], heard(1)) == {}
    assert leases.look(9.0, [], heard(1)) == {}, "it holds nothing here"
    assert [leases.look(9.0 + number * LOOK_S, [ME], heard(1)) for number in range(1, 20)] == [{}] * 19


@pytest.mark.parametrize(("lease_s", "longest_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_a_lease_takes_time(lease_s: float, longest_s: float) -> None:
    with pytest.raises(ValueError, match="take time"):
        RunnerLeases(lease_s, longest_s)
