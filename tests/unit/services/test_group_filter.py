"""Dynamic sampling: groups without a signal are dropped and counted, a bounded number a batch; a baseline is not missed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.policies.batching import DropCause, Group, GroupAssembler, GroupFilter, Member
from tests.support.examples import examples

rewards = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=3)


def numbered(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


@examples(300)
@given(st.lists(st.one_of(rewards, st.none()), max_size=40), st.integers(0, 3))
def test_no_more_are_dropped_between_two_batches_than_is_allowed(came: list[list[float] | None], most: int) -> None:
    """None: a batch is taken. What differs is never dropped, what is equal always, until the bound is reached."""
    chosen, dropped = GroupFilter(most_equal=most), 0
    for values in came:
        if values is None:
            chosen.batch_taken()
            dropped = 0
            continue
        objection = chosen.judge(numbered(values))
        equal = len(set(values)) == 1
        assert (objection is not None) == (equal and dropped < most)
        if objection is not None:
            assert objection[0] == DropCause.EQUAL_REWARDS
            dropped += 1


def test_a_group_without_its_baseline_or_without_another_is_nothing() -> None:
    chosen = GroupFilter(baseline=True)
    assert chosen.judge({0: 1.0, 2: 1.0}) is None
    for lost in ({1: 1.0, 2: 0.0}, {0: 1.0}):
        objection = chosen.judge(lost)
        assert objection is not None and objection[0] == DropCause.NO_BASELINE


def member(group: str, index: int, reward: float, size: int = 2) -> Member[float]:
    return Member(f"{group}/{index}", group, int(group[1:]), size, index, reward)


def test_what_is_judged_unfit_leaves_once_and_takes_its_latecomers_along() -> None:
    chosen = GroupFilter(most_equal=1)

    def judge(group: Group[float]) -> tuple[DropCause, str] | None:
        return chosen.judge({one.index: one.payload for one in group.members})

    assembler: GroupAssembler[float] = GroupAssembler(judge=judge)
    assert assembler.add(member("g0", 0, 1.0), 0.0).drops == []
    verdict = assembler.add(member("g0", 1, 1.0), 0.0)
    assert [(drop.entry, drop.cause) for drop in verdict.drops] == [
        ("g0/0", DropCause.EQUAL_REWARDS),
        ("g0/1", DropCause.EQUAL_REWARDS),
    ]
    assert verdict.spoiled == ["g0"] and assembler.complete == 0 and assembler.rest() == []
    assert [drop.cause for drop in assembler.add(member("g0", 1, 0.0), 1.0).drops] == [DropCause.EQUAL_REWARDS]
    # The bound is reached: the next one is trained as it is, also where a sibling of it was lost.
    for index in (0, 1):
        assembler.add(member("g1", index, 0.0, size=3), 2.0)
    assert assembler.expire(["g1"]).drops == []
    assert assembler.complete == 1
