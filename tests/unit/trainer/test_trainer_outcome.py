"""What metrics say of a batch's outcome."""

from __future__ import annotations

import math

import msgspec
import pytest

from services.policies.batching import Group
from services.wire.run_metrics import TaskOutcome
from services.wire.trajectory import Trajectory
from tests.support.trajectories import a_rollout, a_segment, group_of
from trainer.algorithms.advantages.rewards import Batch
from trainer.metrics.step import outcome

UNKNOWN = 1


def a_batch() -> Batch:
    """Two groups of two. One has equal rewards; one trajectory was cut, one had tools left out, prompts hold 3 unknowns."""
    first = [
        a_rollout(
            [a_segment([UNKNOWN, 5], [7, UNKNOWN], [-0.5, -1.5], [0, 0])], reward, group="g0", member=member, size=2
        )
        for member, reward in enumerate((1.0, 0.0))
    ]
    second = [
        a_rollout([a_segment([6, 5], [7], [-1.0], [0])], 0.5, group="g1", ordinal=1, member=member, size=2)
        for member in range(2)
    ]
    first[0] = msgspec.structs.replace(
        first[0], finish_reason="length", reward_components={"success": 1.0, "form": 0.5}
    )
    second[0] = msgspec.structs.replace(second[0], unrendered_tools=True)
    second[1] = msgspec.structs.replace(
        second[1], segments=[a_segment([UNKNOWN, 5], [7], [-1.0], [0])], reward_components={}
    )
    return Batch.of([group_of(first), group_of(second)])


def test_figures_of_a_batch() -> None:
    found = outcome(a_batch(), UNKNOWN)
    assert found.equal_groups == 0.5
    assert found.truncated == 0.25
    assert found.entropy == pytest.approx((0.5 + 1.5) * 2 / 6 + 2 / 6)
    assert found.unknown_tokens == 3, "those of prompts; a policy may say whatever it likes"
    assert found.unrendered_tools == 1
    assert found.reward == 0.5 and found.reward_spread == pytest.approx(math.sqrt(0.125))
    assert found.components == {"form": 0.5, "success": pytest.approx(2 / 3)}


def test_each_task_is_told_apart() -> None:
    def rollouts(name: str, task: str, reward: float, length: int) -> Group[Trajectory]:
        said = a_segment([5], [7] * length, [-1.0] * length, [0] * length)
        both = (a_rollout([said], reward, group=name, size=2, member=member) for member in range(2))
        return group_of([msgspec.structs.replace(one, task=task) for one in both])

    mixed = [rollouts("g0", "b", 1.0, 1), rollouts("g1", "a", 0.0, 3), rollouts("g2", "a", 2.0, 1)]
    found = outcome(Batch.of(mixed)).tasks
    assert list(found) == ["a", "b"]
    assert found["a"] == TaskOutcome(groups=2, trajectories=4, reward=1.0, success=0.5, response_length=2.0)
    assert found["b"] == TaskOutcome(groups=1, trajectories=2, reward=1.0, success=1.0, response_length=1.0)


def test_a_vocabulary_that_has_tokens_for_every_text_has_no_unknown_ones() -> None:
    assert outcome(a_batch()).unknown_tokens == 0
