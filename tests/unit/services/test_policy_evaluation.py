"""What answers to held-out problems say: pass@k against counting, intervals that hold their level."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.training.evaluation import (
    LEVEL,
    best_of,
    evaluation_of,
    interval,
    ks_of,
    pass_at,
    point_of,
    success_of,
)
from services.supervisor.evaluate import evaluation_lines
from services.wire.rollout_api import EvaluationAnswers, ShownAnswer

RUNS = 4000


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(solved: list[int], k: int) -> None:
    """Against all ways to choose k of the six answers."""
    counted = []
    for right in solved:
        answers = [place < right for place in range(6)]
        counted.append(fmean(any(chosen) for chosen in combinations(answers, k)))
    assert pass_at(solved, 6, k) == pytest.approx(fmean(counted))


def test_pass_at_one_is_the_success_and_more_than_there_are_is_refused() -> None:
    assert pass_at([1, 0, 2], 2, 1) == pytest.approx(success_of([1, 0, 2], 2)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@3 cannot be told from 2"):
        pass_at([1], 2, 3)
    assert [ks_of(samples) for samples in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("success", [0.02, 0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("problems", [64, 256])
def test_the_interval_holds_its_level_with_one_answer_a_problem(success: float, problems: int) -> None:
    drawn = np.random.default_rng(1).random((RUNS, problems)) < success
    held = [_holds(row.astype(int).tolist(), 1, success) for row in drawn]
    # The level of Wilson's interval wanders about its nominal one with success and count.
    assert LEVEL - 0.025 < fmean(held) < 0.99


@pytest.mark.parametrize("samples", [2, 8])
@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (0.5, 2.0), (5.0, 1.0), (1000.0, 1000.0)])
def test_the_interval_holds_its_level_where_problems_differ(samples: int, a: float, b: float) -> None:
    """Problems are drawn anew, each with a success of its own, from nearly always or never to nearly all alike."""
    chance = np.random.default_rng(2)
    shares = chance.beta(a, b, (RUNS // 4, 128))
    solved = chance.binomial(samples, shares)
    held = [_holds(row.tolist(), samples, a / (a + b)) for row in solved]
    assert fmean(held) > LEVEL - 0.025


def _holds(solved: list[int], samples: int, success: float) -> bool:
    found = interval(solved, samples)
    return found.low <= success <= found.high


@given(st.integers(1, 8), st.data())
def test_the_interval_holds_what_was_measured(samples: int, data: st.DataObject) -> None:
    solved = data.draw(st.lists(st.integers(0, samples), min_size=1, max_size=40))
    told = EvaluationAnswers(
        due=3,
        first_version=3,
        last_version=4,
        task="t",
        samples=samples,
        solved=solved,
        temperature=1.0,
        mean_length=2.0,
        seconds=1.0,
        at=0.0,
    )
    found = evaluation_of(told)
    assert 0.0 <= found.low <= found.success <= found.high <= 1.0
    assert found.problems == len(solved) and found.pass_at[1] == pytest.approx(found.success)
    assert list(found.pass_at.values()) == sorted(found.pass_at.values())


def test_each_task_of_an_evaluation_is_told_apart() -> None:
    of = {"task": "a", "solved": [2, 0], "mean_length": 4.0}, {"task": "b", "solved": [2], "mean_length": 1.0}
    whole = {"due": 3, "first_version": 3, "last_version": 4, "task": "a, b", "samples": 2, "temperature": 1.0}
    told = {**whole, "solved": [2, 0, 2], "mean_length": 3.0, "seconds": 1.0, "at": 0.0, "tasks": list(of)}
    found = evaluation_of(EvaluationAnswers.model_validate(told))
    assert (found.success, found.problems, found.mean_length) == (pytest.approx(2 / 3), 3, 3.0)
    assert {name: (each.success, each.problems, each.mean_length) for name, each in found.tasks.items()} == {
        "a": (0.5, 2, 4.0),
        "b": (1.0, 1, 1.0),
    }
    point = point_of(found)
    assert (point.success, point.tasks["a"].success, point.tasks["b"].high) == (found.success, 0.5, 1.0)
    with pytest.raises(ValueError, match="not what the tasks say"):
        EvaluationAnswers.model_validate(told | {"solved": [0, 2, 2]})


def test_what_an_agent_did_is_told_between_question_and_answer_and_calls_that_no_parser_read_are_named() -> None:
    asked = {"due": 3, "first_version": 3, "last_version": 3, "task": "a", "solved": [1, 0], "mean_length": 4.0}
    told = EvaluationAnswers.model_validate({**asked, "samples": 1, "temperature": 1.0, "seconds": 1.0, "at": 0.0})
    called = ShownAnswer(asked="How warm?", between="call\n25", answer="25.", reward=1.0, success=True)
    lines = evaluation_lines(evaluation_of(told.model_copy(update={"shown": [called]})), 2.0)
    assert lines[-3:] == ['   asked     "How warm?"', '   then      "call\\n25"', '   answered  "25."']
    unread = called.model_copy(update={"between": "", "answer": '<tool_call>{"name": "f"}</tool_call>'})
    lines = evaluation_lines(evaluation_of(told.model_copy(update={"shown": [called, unread]})), 2.0)
    assert lines[-1].endswith("set rollout.tool_parser=hermes")
    assert sum("then" in line for line in lines) == 1


def test_the_best_is_the_oldest_of_the_highest() -> None:
    assert best_of([(10, 0.5), (20, 0.8), (30, 0.8), (40, 0.1)]) == 20
    assert best_of([]) is None


def test_problems_that_ask_the_same_count_once() -> None:
    assert interval([1, 0] * 128, 1, different=16) == interval([1, 0] * 8, 1)
    assert interval([1, 0] * 128, 1, different=256) == interval([1, 0] * 128, 1)
