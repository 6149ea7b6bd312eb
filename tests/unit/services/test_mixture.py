"""Mixtures of tasks: a pure function of seed and ordinal, exact over blocks, even within them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.config.load import dump_settings, load_settings
from services.policies.training.mixture import draw, parts_of
from services.supervisor.preflight import check_first_policy, find_tasks
from services.wire.errors import UsageError
from services.wire.rollout_api import MixedTask, Mixture, OpenGroup, SamplingBody

PARTS = st.lists(st.integers(1, 12), min_size=1, max_size=6).map(tuple)


@given(PARTS, st.integers(0, 1 << 40), st.integers(0, 200))
def test_every_block_holds_each_task_as_often_as_its_parts(parts: tuple[int, ...], seed: int, block: int) -> None:
    size = sum(parts)
    drawn = Counter(draw(parts, seed, block * size + at).task for at in range(size))
    assert [drawn[task] for task in range(len(parts))] == list(parts)


@given(PARTS, st.integers(0, 1 << 40), st.integers(0, 3))
def test_problems_of_a_task_are_numbered_without_a_gap_in_the_order_of_ordinals(
    parts: tuple[int, ...], seed: int, blocks: int
) -> None:
    seen: Counter[int] = Counter()
    for ordinal in range(blocks * sum(parts) + 1):
        found = draw(parts, seed, ordinal)
        assert found.place == seen[found.task]
        seen[found.task] += 1


@settings(max_examples=60)
@given(PARTS, st.integers(0, 1 << 40), st.integers(0, 5), st.integers(1, 60))
def test_no_stretch_of_groups_strays_far_from_the_weights(
    parts: tuple[int, ...], seed: int, first: int, length: int
) -> None:
    drawn = Counter(draw(parts, seed, ordinal).task for ordinal in range(first, first + length))
    for task, part in enumerate(parts):
        expected = length * part / sum(parts)
        assert abs(drawn[task] - expected) <= 2 + 2 * len(parts) * part / sum(parts)


def test_another_seed_gives_another_order_and_one_seed_always_the_same() -> None:
    def order(seed: int) -> list[int]:
        return [draw((3, 2, 1), seed, ordinal).task for ordinal in range(600)]

    assert order(1) == order(1) != order(2)
    blocks = {tuple(order(1)[start : start + 6]) for start in range(0, 600, 6)}
    assert len(blocks) > 10, "blocks are not all alike"


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([1.0], (1,)),
        ([3, 1], (3, 1)),
        ([0.7, 0.3], (7, 3)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([50, 100], (1, 2)),
        ([0.333, 0.667], (333, 667)),
        ([1e-2, 1], (1, 100)),
    ],
)
def test_weights_are_taken_as_they_are_written(weights: list[float], parts: tuple[int, ...]) -> None:
    assert parts_of(weights) == parts


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0], [float("inf"), 1.0], [0.12345, 1.0]])
def test_weights_that_cannot_hold_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"above 0|fewer digits"):
        parts_of(weights)


def test_a_group_is_of_a_task_or_of_a_mixture() -> None:
    sampling = SamplingBody(max_tokens=4)
    mixture = Mixture(seed=1, tasks=[MixedTask(task="a", parts=1, sampling=sampling)])
    OpenGroup(group_size=2, mixture=mixture)
    for wrong in (
        {"task": "a"},
        {"sampling": sampling},
        {"task": "a", "sampling": sampling, "mixture": mixture},
        {"mixture": mixture, "purpose": "evaluate"},
    ):
        with pytest.raises(ValueError, match="mixture"):
            OpenGroup(group_size=2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1001 parts together"):
        Mixture(
            seed=1, tasks=[MixedTask(task=f"{n}", parts=parts, sampling=sampling) for n, parts in enumerate((1000, 1))]
        )


TWO = """
[[tasks]]
task = "running-sums"
weight = 3
[[tasks]]
task = "prompts:rows.jsonl"
name = "rows"
max_tokens = 512
"""


def test_tasks_survive_the_configuration_file_with_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TWO)
    found = find_tasks(load_settings(tmp_path / "run.toml", []))
    (tmp_path / "config.toml").write_text(dump_settings(found))
    again = load_settings(tmp_path / "config.toml", [])
    assert again.played == found.played
    assert [each.task for each in again.played] == ["running-sums", f"prompts:{tmp_path / 'rows.jsonl'}"]
    assert again.played[1].max_tokens == 512
    assert found.task_in_words == "running-sums (75%), rows (25%)"
    assert [each.task for each in load_settings(None, []).played] == ["running-sums"]
    with pytest.raises(UsageError, match=r"model\.path"):
        check_first_policy(found)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (TWO, ["task=guess-number"], "task=guess-number would have no effect beside tasks"),
        (TWO.replace("weight = 3", "weight = 0.12345"), [], "fewer digits"),
        (TWO.replace("weight = 3", "weight = 0"), [], "write more than 0"),
        (TWO.replace("weight", "weigth"), [], "weigth"),
        (TWO.replace("running-sums", "runing-sums"), [], "did you mean 'running-sums'"),
        (TWO.replace("weight = 3", 'name = "rows"'), [], "two tasks are named 'rows'"),
        (
            TWO.replace("prompts:rows.jsonl", "running-sums").replace('name = "rows"', ""),
            [],
            "'running-sums': give one",
        ),
        (
            TWO + '[[rewards.components]]\nname = "r"\nfunction = "m:f"\ntasks = ["rose"]',
            [],
            "for a task 'rose' that is not played: there are: rows, running-sums",
        ),
    ],
)
def test_tasks_that_cannot_be_are_refused(tmp_path: Path, text: str, overrides: list[str], words: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        load_settings(tmp_path / "run.toml", overrides)
