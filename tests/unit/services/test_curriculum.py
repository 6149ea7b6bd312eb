"""Curriculum by measured success: what rests, for how long, what comes back, and going on after a restart."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config.load import load_settings
from services.policies.training.curriculum import Curriculum, CurriculumRules, CurriculumState, Record, judged
from services.wire.errors import UsageError

RULES = st.builds(
    CurriculumRules,
    agreeing=st.integers(1, 3),
    longest_rest=st.integers(1, 6),
    least_share=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
)
GROUP = 4
Success = Callable[[int, int], int]
"""Problem, pass ──► right answers of GROUP."""


def order(seed: int, count: int) -> Callable[[int], list[int]]:
    return lambda passed: random.Random(f"{seed}/{passed}").sample(range(count), count)


def passes(curriculum: Curriculum, success: Success, draws: int) -> list[list[int]]:
    """What was drawn, by pass; each result is there before the next draw."""
    drawn: dict[int, list[int]] = {}
    for _ in range(draws):
        number = curriculum.draw()
        passed = curriculum.plan.passed
        drawn.setdefault(passed, []).append(number)
        curriculum.played(number, success(number, passed), GROUP)
    assert list(drawn) == list(range(min(drawn), max(drawn) + 1)), "no pass is left out"
    return list(drawn.values())


def results(seed: int) -> Success:
    """Some problems are always solved, some never, some change."""

    def success(number: int, passed: int) -> int:
        kind = random.Random(f"{seed}/{number}").randrange(4)
        return (0, GROUP, 2, random.Random(f"{seed}/{number}/{passed}").choice([0, 1, GROUP]))[kind]

    return success


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), RULES, st.integers(0, 1000))
def test_each_pass_plays_what_does_not_rest_once_and_never_less_than_the_least_share(
    count: int, rules: CurriculumRules, seed: int
) -> None:
    curriculum = Curriculum(count, rules, order(seed, count))
    played = passes(curriculum, results(seed), 12 * count)
    assert sorted(played[0]) == list(range(count)), "nothing is known yet"
    for drawn in played:
        assert max(Counter(drawn).values()) == 1
    for drawn in played[:-1]:
        assert len(drawn) >= max(1, rules.least_share * count)
    assert 0.0 <= curriculum.plan.share_skipped <= 1.0 - 1 / count


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), RULES, st.integers(0, 1000))
def test_every_problem_comes_back_within_the_longest_rest(count: int, rules: CurriculumRules, seed: int) -> None:
    curriculum = Curriculum(count, rules, order(seed, count))
    played = passes(curriculum, results(seed), 20 * count)
    for number in range(count):
        at = [passed for passed, drawn in enumerate(played[:-1]) if number in drawn]
        gaps = [later - earlier for earlier, later in zip([-1, *at], [*at, len(played) - 1], strict=True)]
        assert max(gaps) <= rules.longest_rest + 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), RULES, st.integers(0, 1000))
def test_a_problem_that_some_siblings_solve_never_rests(count: int, rules: CurriculumRules, seed: int) -> None:
    def success(number: int, passed: int) -> int:
        return 1 if number == 0 else GROUP

    curriculum = Curriculum(count, rules, order(seed, count))
    for drawn in passes(curriculum, success, 12 * count)[:-1]:
        assert 0 in drawn


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), RULES, st.integers(0, 1000), st.integers(0, 150), st.integers(0, 6))
def test_a_restart_at_any_point_goes_on_as_if_there_had_been_none(
    count: int, rules: CurriculumRules, seed: int, stop: int, late: int
) -> None:
    """With `late` results outstanding, as with groups in play."""

    def go_on(curriculum: Curriculum, waiting: list[int], draws: int) -> list[int]:
        drawn = []
        for _ in range(draws):
            number = curriculum.draw()
            drawn.append(number)
            waiting.append(number)
            if len(waiting) > late:
                done = waiting.pop(0)
                curriculum.played(done, results(seed)(done, curriculum.plan.passed), GROUP)
        return drawn

    one, waiting = Curriculum(count, rules, order(seed, count)), list[int]()
    go_on(one, waiting, stop)
    kept = msgspec.json.decode(msgspec.json.encode(one.state()), type=CurriculumState)
    other = Curriculum(count, rules, order(seed, count), kept)
    assert other.plan == one.plan
    assert go_on(other, list(waiting), 100) == go_on(one, list(waiting), 100)
    assert other.state() == one.state()


@given(RULES, st.lists(st.integers(0, GROUP), min_size=1, max_size=20))
def test_a_rest_grows_while_nothing_changes_and_begins_anew_once_something_does(
    rules: CurriculumRules, solved: list[int]
) -> None:
    record, passed, rests = Record(), 0, 0
    for index, right in enumerate(solved):
        record = judged(record, right, GROUP, passed, rules)
        last = solved[max(0, index + 1 - rules.agreeing) : index + 1]
        rest = record.until - passed - 1
        if len(last) == rules.agreeing and (set(last) == {0} or set(last) == {GROUP}):
            same = index > 0 and solved[index - 1] == right
            rests = rests + 1 if same else 1
            assert rest == min(rules.longest_rest, 2 ** (rests - 1))
        else:
            assert rest == -1, "it is in the next pass"
            rests = 0
        passed = max(passed + 1, record.until)


def test_what_always_does_the_same_rests_for_one_pass_then_two_then_four() -> None:
    curriculum = Curriculum(2, CurriculumRules(longest_rest=4, least_share=0.01), order(1, 2))
    played = passes(curriculum, lambda number, _: GROUP if number else 1, 40)
    assert [passed for passed, drawn in enumerate(played) if 1 in drawn][:6] == [0, 2, 5, 10, 15, 20]


def test_where_everything_rests_those_are_played_whose_rest_ends_first() -> None:
    rules = CurriculumRules(longest_rest=8, least_share=0.25)
    curriculum = Curriculum(8, rules, order(3, 8))
    played = passes(curriculum, lambda number, _: 0 if number % 2 else GROUP, 60)
    assert len(played[1]) == 2, "the least share of them"
    assert played[1] == [number for number in order(3, 8)(1) if number in played[1]], "in the order of the pass"
    assert curriculum.plan.solved + curriculum.plan.unsolved + len(curriculum.plan.playing) == 8
    assert all(drawn for drawn in played)


@pytest.mark.parametrize(
    "state",
    [
        CurriculumState(0, 0, [0, 5], 0, {}),
        CurriculumState(0, 0, [], 0, {}),
        CurriculumState(0, 0, [0], 0, {9: Record()}),
    ],
)
def test_a_state_of_other_problems_is_refused(state: CurriculumState) -> None:
    with pytest.raises(ValueError, match="not of 3 problems"):
        Curriculum(3, CurriculumRules(), order(1, 3), state)


def test_a_setting_of_a_curriculum_that_is_off_is_refused() -> None:
    assert load_settings(None, []).curriculum.rules is None
    found = load_settings(None, ["curriculum.enabled=true", "curriculum.agreeing=3"]).curriculum.rules
    assert found == CurriculumRules(agreeing=3, longest_rest=8, least_share=0.1)
    with pytest.raises(UsageError, match=r"curriculum\.agreeing=3 would have no effect"):
        load_settings(None, ["curriculum.agreeing=3"])
