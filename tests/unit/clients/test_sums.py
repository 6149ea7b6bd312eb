"""The task of sums: what is right, and pairs that are kept apart."""

from __future__ import annotations

import pytest

from clients.environments.base import Answer, Ended, Problem, Split
from clients.environments.registry import make_task
from clients.environments.tasks.sums import LARGEST, Sums

PROBLEM = Problem("train", 0, prompt="What is 3 + 8? Reply with the number only.", solution="11")


@pytest.mark.parametrize(
    ("text", "right", "exact"),
    [
        ("11", True, True),
        (" 11\n", True, True),
        ("3 + 8 = 11", True, False),
        ("It is 11.", True, False),
        ("11, for 3 + 8", False, False),
        ("111", False, False),
        ("eleven", False, False),
        ("", False, False),
    ],
)
def test_an_answer_is_right_by_its_last_number(text: str, right: bool, exact: bool) -> None:
    ended = Sums().start(PROBLEM).respond(Answer(text, complete=True))
    assert isinstance(ended, Ended)
    assert (ended.success, ended.reward, ended.components) == (right, float(right), {"exact": float(exact)})


def test_pairs_belong_to_one_split_for_good() -> None:
    asked: dict[Split, set[str]] = {"train": set(), "held_out": set()}
    for split, prompts in asked.items():
        prompts |= {Sums().problem(split, index, seed).prompt for index in range(300) for seed in (1, 2)}
    assert not asked["train"] & asked["held_out"]
    assert len(asked["train"]) + len(asked["held_out"]) == LARGEST**2
    assert len(asked["held_out"]) > 4


def test_the_task_is_spoken_as_chat() -> None:
    assert make_task("sums").dialect == "chat"
