"""Clip, scale and running normalisation of rewards: their formulas, each task by itself, and what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.load import load_settings
from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, CostSettings, RewardShaping
from services.wire.errors import UsageError
from services.wire.trajectory import RewardSpan, Trajectory
from tests.support.examples import examples
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.algorithms.advantages.rewards import Batch, CostPrice, score
from trainer.algorithms.advantages.shaping import Moments, RewardShaper
from trainer.algorithms.describe import describe_advantage
from trainer.checkpoint import checkpoint
from trainer.model.roles import Roles, make_roles
from trainer.sft.tiny_model import build_model

REWARDS = st.lists(st.integers(-10_000, 10_000).map(lambda number: number / 100), min_size=1, max_size=12)


def rollouts(rewards: list[float], task: str = "a", group: str = "g0") -> list[Trajectory]:
    said = a_segment([2], [4, 5], [-1.0, -1.0], [0, 0])
    of = (
        a_rollout([said], reward, group=group, size=len(rewards), member=member)
        for member, reward in enumerate(rewards)
    )
    return [msgspec.structs.replace(one, task=task) for one in of]


@examples(200)
@given(st.lists(REWARDS, min_size=1, max_size=6))
def test_moments_of_batches_one_after_the_other_are_those_of_all_together(batches: list[list[float]]) -> None:
    found = Moments()
    for batch in batches:
        found = found.merged(np.array(batch))
    together = np.array([reward for batch in batches for reward in batch])
    assert found.count == len(together)
    assert found.mean == pytest.approx(together.mean(), rel=1e-9, abs=1e-9)
    assert found.std == pytest.approx(together.std(), rel=1e-9, abs=1e-6)


@examples(100)
@given(
    st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=4),
    st.floats(0.1, 5.0),
    st.sampled_from([None, (-1.0, 2.0)]),
)
def test_each_task_is_normalised_by_its_own_rewards_so_far(
    batches: list[tuple[list[float], list[float]]], scale: float, clip: tuple[float, float] | None
) -> None:
    shaper = RewardShaper(RewardShaping(clip=clip, scale=scale, normalise=True))
    so_far: dict[str, list[float]] = {"a": [], "b": []}
    for of_a, of_b in batches:
        played = rollouts(of_a, "a") + rollouts(of_b, "b", "g1")
        found, factors = shaper.of(played)
        again, _ = shaper.of(played)
        assert found.tolist() == again.tolist(), "a batch that is tried again counts once"
        shaper.learn(played)
        expected: list[float] = []
        for task, rewards in (("a", of_a), ("b", of_b)):
            bounded = np.clip(rewards, *clip) if clip else np.array(rewards)
            so_far[task] += bounded.tolist()
            mean, std = np.mean(so_far[task]), np.std(so_far[task])
            apart = std > 1e-6  # else all of them are equal
            expected += (scale * (bounded - mean) / (std + 1e-8)).tolist() if apart else [0.0] * len(rewards)
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-5)
        assert len(factors) == len(played)


def test_bounds_and_scale_alone_know_nothing_of_batches_before() -> None:
    shaper = RewardShaper(RewardShaping(clip=(0.0, 1.0), scale=2.0))
    played = rollouts([-3.0, 0.25, 7.0])
    shaper.learn(played)
    found, factors = shaper.of(played)
    assert found.tolist() == [0.0, 0.5, 2.0] and factors.tolist() == [2.0] * 3
    assert shaper.by_task == {} and not shaper.remembers


def test_a_greedy_baseline_is_shaped_and_not_learned_from() -> None:
    settings = AdvantageSettings(estimator="remax", reward=RewardShaping(normalise=True))
    computer = AdvantageComputer(settings)
    groups = grouped(rollouts([100.0, 1.0, 3.0]))
    computer.of(groups)
    computer.learn(groups)
    assert computer.shaper.by_task == {"a": Moments(2, 2.0, 2.0)}
    assert not computer.independent, "its batches cannot be prepared ahead of each other"


def test_penalties_and_costs_come_after_and_rewards_of_calls_keep_their_part() -> None:
    shaping = RewardShaping(clip=(0.0, 3.0), scale=2.0)
    first, second = rollouts([9.0, 0.0])
    first = msgspec.structs.replace(first, reward_spans=[RewardSpan(0, 1, 1, 0.5)], reward_components={"harm": 1.0})
    second = msgspec.structs.replace(second, reward_components={"harm": 0.0})
    cost = CostSettings(component="harm")
    settings = AdvantageSettings(reward=shaping, overlong_length=1, cost=cost)
    found = score(Batch.of(grouped([first, second])), settings, 0, CostPrice(cost), None, None)
    # (2·3 − 1 − 1·1)/2 and (0 − 1)/2: two tokens are over the length.
    assert found.outcomes.tolist() == [2.0, -0.5]
    assert found.rewards.tolist() == [0.5, 1.5, 0.0, -0.5], "the call's reward is scaled as all of it is"


def normalising(**shaping: Any) -> Roles:
    advantage = AdvantageSettings(estimator="rloo", reward=RewardShaping.model_validate(shaping))
    settings = RunSettings(trainer=TrainerSettings(advantage=advantage, warmup_steps=0))
    return make_roles(lambda: build_model(seed=5, hidden_size=32, layers=1), settings, 0)


def test_a_checkpoint_brings_the_moments_back(tmp_path: Path) -> None:
    first = normalising(normalise=True)
    for rewards in ([0.1, 0.7], [5.0, 1 / 3]):
        first.advantage_computer.learn(grouped(rollouts(rewards)))
    path = checkpoint.save(tmp_path, checkpoint.snapshot(first, "r", "f"))
    again = normalising(normalise=True)
    assert checkpoint.restore_newest(tmp_path, again, "r") == 0
    moments = again.advantage_computer.shaper.by_task
    assert moments == first.advantage_computer.shaper.by_task and moments["a"].count == 4
    with pytest.raises(checkpoint.MismatchError, match=r"another advantage\.reward\.normalise"):
        checkpoint.restore_newest(tmp_path, normalising(scale=2.0), "r")
    assert path.exists()


@pytest.mark.parametrize(
    ("choices", "part"),
    [
        ({"reward": {"clip": [0.0, 1.0]}}, "R = clip(reward, 0, 1)"),
        ({"estimator": "rloo", "reward": {"scale": 0.5}}, "R = 0.5·reward"),
        (
            {"estimator": "rloo", "reward": {"clip": [-1, 1], "normalise": True, "scale": 2}, "overlong_length": 9},
            "R = 2·(clip(reward, -1, 1) − μ)/(σ + 1e-8) + clip((8 − |y|)/1, −1, 0), μ, σ = mean and standard deviation of",
        ),
        ({"reward": {"normalise": True}, "overlong_length": 9}, "R = (reward − μ)/(σ + 1e-8) + clip("),
    ],
)
def test_the_formula_says_what_becomes_of_the_reward(choices: dict[str, Any], part: str) -> None:
    assert part in describe_advantage(AdvantageSettings.model_validate(choices))


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"reward": {"scale": 2.0}}, "reward.scale=2.0 would have no effect"),
        ({"reward": {"normalise": True}}, "reward.normalise=True would have no effect"),
        ({"estimator": "reinforce_pp", "reward": {"scale": 2.0}}, "reward.scale=2.0 would have no effect"),
        ({"estimator": "opd", "reward": {"clip": [0, 1]}}, "which reads no rewards"),
    ],
)
def test_shaping_without_effect_is_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe_advantage(AdvantageSettings.model_validate(choices))


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="leaves one value at most"):
        load_settings(None, ["trainer.advantage.reward.clip=[1.0, 1.0]"])
    assert load_settings(None, ["trainer.advantage.reward.clip=[0, 1]"]).trainer.advantage.reward.clip == (0.0, 1.0)
