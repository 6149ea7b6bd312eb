"""Groups and batches: every entry leaves exactly once, oldest groups first, and nothing spoiled is ever trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.batching import DropCause, GroupAssembler, Member, Verdict
from tests.support.examples import examples


def member(group: str, index: int, *, ordinal: int = 0, size: int = 2, entry: str | None = None) -> Member[str]:
    name = entry or f"{group}/{index}"
    return Member(entry=name, group=group, ordinal=ordinal, group_size=size, index=index, payload=name)


def test_a_batch_is_the_complete_groups_that_were_opened_first() -> None:
    assembler: GroupAssembler[str] = GroupAssembler()
    for group, ordinal in (("c", 2), ("a", 0), ("b", 1)):
        for index in (1, 0):
            assembler.add(member(group, index, ordinal=ordinal), now=0.0)
    assert assembler.take(4) is None
    batch = assembler.take(2)
    assert batch is not None
    assert [group.group for group in batch] == ["a", "b"]
    assert [one.index for one in batch[0].members] == [0, 1]
    assert assembler.complete == 1


def test_a_straggler_is_passed_and_comes_later() -> None:
    assembler: GroupAssembler[str] = GroupAssembler()
    assembler.add(member("slow", 0, ordinal=0), now=0.0)
    for index in (0, 1):
        assembler.add(member("quick", index, ordinal=1), now=1.0)
    batch = assembler.take(1)
    assert batch is not None and batch[0].group == "quick"
    partial = assembler.oldest_partial()
    assert partial is not None and (partial.group, partial.have, partial.size) == ("slow", 1, 2)
    assembler.add(member("slow", 1, ordinal=0), now=2.0)
    late = assembler.take(1)
    assert late is not None and late[0].group == "slow"


def test_duplicates_are_dropped_before_and_after_the_group_was_taken() -> None:
    assembler: GroupAssembler[str] = GroupAssembler()
    assembler.add(member("g", 0), now=0.0)
    assert [d.cause for d in assembler.add(member("g", 0, entry="again"), now=0.0).drops] == [DropCause.DUPLICATE]
    assembler.add(member("g", 1), now=0.0)
    assert assembler.add(member("g", 1, entry="again too"), now=0.0).drops[0].cause == DropCause.DUPLICATE
    assert assembler.take(1) is not None
    assert assembler.add(member("g", 0, entry="late"), now=0.0).drops[0].cause == DropCause.DUPLICATE


def test_siblings_that_disagree_spoil_their_group_once() -> None:
    assembler: GroupAssembler[str] = GroupAssembler()
    assembler.add(member("g", 0, size=3), now=0.0)
    verdict = assembler.add(member("g", 1, size=2), now=0.0)
    assert {drop.entry: drop.cause for drop in verdict.drops} == {
        "g/0": DropCause.SPOILED_GROUP,
        "g/1": DropCause.INCONSISTENT_GROUP,
    }
    assert verdict.spoiled == ["g"]
    later = assembler.add(member("g", 2, size=3), now=0.0)
    assert [drop.cause for drop in later.drops] == [DropCause.SPOILED_GROUP]
    assert later.spoiled == []


def test_a_group_of_which_too_few_finished_is_dropped_whole() -> None:
    assembler: GroupAssembler[str] = GroupAssembler(smallest=3)
    assembler.add(member("g", 0, size=4), now=5.0)
    assembler.add(member("g", 1, size=4), now=9.0)
    assert assembler.expire(assembler.overdue(5.0)).spoiled == []
    verdict = assembler.expire(assembler.overdue(5.1))
    assert (sorted(drop.entry for drop in verdict.drops), verdict.spoiled) == (["g/0", "g/1"], ["g"])
    assert {(drop.cause, drop.why) for drop in verdict.drops} == {
        (DropCause.INCOMPLETE_GROUP, "group g: 2 of 4 siblings finished, 3 are wanted")
    }
    assert assembler.add(member("g", 2, size=4), now=9.5).drops[0].cause == DropCause.INCOMPLETE_GROUP


def test_a_group_of_which_enough_finished_is_trained_with_those_and_in_its_turn() -> None:
    assembler: GroupAssembler[str] = GroupAssembler(smallest=3)
    for index in (3, 0, 1):
        assembler.add(member("g", index, size=4, ordinal=1), now=5.0)
    for index in (0, 1):
        assembler.add(member("later", index, ordinal=2), now=5.0)
    assert assembler.expire(["g", "unheard of"]) == Verdict()
    late = assembler.add(member("g", 2, size=4, ordinal=1), now=9.0)
    assert ([drop.cause for drop in late.drops], late.spoiled) == ([DropCause.LATE], [])
    batch = assembler.take(2)
    assert batch is not None
    assert [(group.group, [one.index for one in group.members], group.lost) for group in batch] == [
        ("g", [0, 1, 3], 1),
        ("later", [0, 1], 0),
    ]
    assert assembler.add(member("g", 2, size=4, ordinal=1), now=9.0).drops[0].cause == DropCause.LATE
    assert assembler.expire(["g"]) == Verdict()


def test_nobody_is_trained_alone() -> None:
    with pytest.raises(ValueError, match="two to compare"):
        GroupAssembler(smallest=1)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.integers(-1, 3)),
        st.tuples(st.just("take"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("spoil"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("expire"), st.integers(0, 40), st.just(0)),
    ),
    max_size=60,
)


@examples(300)
@given(actions)
def test_under_any_schedule_each_entry_leaves_exactly_once(schedule: list[tuple[str, int, int]]) -> None:
    """Groups 0 … 3 have two siblings, 4 and 5 have three, of which two are enough; indices may lie outside, repeat, come
    late."""
    assembler: GroupAssembler[str] = GroupAssembler()
    came: list[str] = []
    left: list[str] = []
    spoiled: list[str] = []
    trained: list[str] = []
    for time, (action, number, index) in enumerate(schedule):
        group = f"g{number}"
        if action == "add":
            came.append(f"e{time}")
            size = 2 if number < 4 else 3
            verdict = assembler.add(member(group, index, ordinal=number, size=size, entry=f"e{time}"), now=float(time))
        elif action == "spoil":
            verdict = assembler.spoil(group)
        elif action == "expire":
            verdict = assembler.expire(assembler.overdue(float(number)))
        else:
            batch = assembler.take(number)
            assert batch is None or [one.ordinal for one in batch] == sorted(one.ordinal for one in batch)
            for one in batch or []:
                trained.append(one.group)
                indices = [m.index for m in one.members]
                assert indices == sorted(set(indices)) and 2 <= len(indices) <= one.members[0].group_size
                assert one.lost == one.members[0].group_size - len(indices)
                left += [m.entry for m in one.members]
            continue
        left += [drop.entry for drop in verdict.drops]
        spoiled += verdict.spoiled
    assert sorted(left + assembler.rest()) == sorted(came)
    assert len(set(trained)) == len(trained)
    assert len(set(spoiled)) == len(spoiled)
    assert not set(spoiled) & set(trained)
