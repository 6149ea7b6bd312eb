"""A reward function by its name: what can be called, with which arguments, and what its value may be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.policies.rewards import RewardFailure
from services.rewards.sandbox.function import RewardFunction, load_function
from services.rewards.sandbox.protocol import Failed, Sample, Value
from services.wire.errors import UsageError

SOURCE = """
import sys

number = 3


class Judge:
    @staticmethod
    def exact(answer, solution, bonus=0.25):
        return (answer == solution) + bonus


def everything(answer, **metadata):
    return len(metadata)


def any_number(*numbers, answer):
    return len(numbers) + float(answer)


def by_position(answer, /):
    return 1.0


async def later(answer):
    return 1.0


def says(answer):
    return {"word": "one", "nan": float("nan"), "huge": 10 ** 400, "list": [1], "true": True}[answer]


def ends(answer):
    raise {"exit": SystemExit(2), "memory": MemoryError(), "half": ValueError("\\ud800")}[answer]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place: Path = tmp_path_factory.mktemp("functions")
    (place / "judges_of_a_test.py").write_text(SOURCE)
    (place / "leaves_of_a_test.py").write_text("raise SystemExit('not today')\n")
    yield str(place)
    sys.path.remove(str(place))


@pytest.fixture
def load(folder: str) -> Any:
    def named(attribute: str) -> RewardFunction:
        return load_function(f"judges_of_a_test:{attribute}", folder)

    return named


def sample(said: str, **metadata: Any) -> Sample:
    return Sample(task="sums", prompt="1+1", messages=None, answer=said, complete=True, metadata=metadata)


def test_a_function_gets_what_it_names(load: Any) -> None:
    exact = load("Judge.exact")
    assert exact.call(sample("2", solution="2", unused=1)) == Value(1.25)
    assert exact.call(sample("2", solution="3", bonus=0.0)) == Value(0.0)
    missing = exact.call(sample("2"))
    assert missing == Failed(RewardFailure.SAMPLE, "the sample's metadata has no 'solution'")
    assert load("everything").call(sample("2", first=1, second=2)) == Value(7.0)
    assert load("any_number").call(sample("2")) == Value(2.0)


def test_what_a_sample_says_of_itself_is_not_replaced_by_its_metadata(load: Any) -> None:
    assert load("any_number").call(sample("2", answer="9")) == Value(2.0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("true", Value(1.0)),
        ("word", Failed(RewardFailure.VALUE, "it returned str, no number")),
        ("list", Failed(RewardFailure.VALUE, "it returned list, no number")),
        ("huge", Failed(RewardFailure.VALUE, "it returned int, no number")),
        ("nan", Failed(RewardFailure.VALUE, "it returned nan")),
    ],
)
def test_a_value_is_a_finite_number(load: Any, answer: str, told: Value | Failed) -> None:
    assert load("says").call(sample(answer)) == told


def test_whatever_ends_a_call_is_told_with_its_line(load: Any) -> None:
    ended = load("ends").call(sample("exit"))
    line = 1 + next(at for at, text in enumerate(SOURCE.splitlines()) if "SystemExit" in text)
    assert ended == Failed(RewardFailure.RAISED, f"SystemExit: 2 (judges_of_a_test.py:{line})")
    assert load("ends").call(sample("memory")) == Failed(RewardFailure.MEMORY, "it ran out of memory")
    assert load("ends").call(sample("half")).what.startswith("ValueError: ? (")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("judges_of_a_test:nothing", "no attribute 'nothing'"),
        ("judges_of_a_test:number", "is int, no function"),
        ("judges_of_a_test:later", "is a coroutine function"),
        ("judges_of_a_test:by_position", "takes 'answer' by position only"),
        ("absent_of_a_test:judge", "No module named 'absent_of_a_test'"),
        ("leaves_of_a_test:judge", "SystemExit: not today"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_reason(folder: str, name: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_function(name, folder)
    assert words in refused.value.what
    assert refused.value.remedy
