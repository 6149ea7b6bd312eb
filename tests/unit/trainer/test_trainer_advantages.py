"""Every estimator against its published formula, in float64 arithmetic written out token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.training.algorithm import AdvantageSettings
from tests.support.examples import examples
from trainer.algorithms.advantages.batch import RewardBatch, discounted_sums
from trainer.algorithms.advantages.registry import ADVANTAGES, load_estimator


@dataclass(frozen=True)
class Sampled:
    """One trajectory: what each of its tokens earned, and a critic's value before it."""

    rewards: tuple[float, ...]
    values: tuple[float, ...]
    trained: bool = True

    @property
    def outcome(self) -> float:
        return math.fsum(self.rewards)


Groups = Sequence[Sequence[Sampled]]
number = st.floats(-3.0, 3.0)
sampled = st.lists(st.tuples(number, number), min_size=1, max_size=5).map(
    lambda tokens: Sampled(tuple(t[0] for t in tokens), tuple(t[1] for t in tokens))
)
some_groups = st.lists(st.lists(sampled, min_size=2, max_size=4), min_size=1, max_size=3)
plain = AdvantageSettings()


def reward_batch(groups: Groups, *, greedy_first: bool = False) -> RewardBatch:
    trajectories = [one for group in groups for one in group]
    first = [place == 0 and greedy_first for group in groups for place, _ in enumerate(group)]
    lengths = [len(one.rewards) for one in trajectories]
    return RewardBatch(
        outcomes=np.array([one.outcome for one in trajectories]),
        rewards=np.array([reward for one in trajectories for reward in one.rewards]),
        trajectory=np.repeat(np.arange(len(trajectories)), lengths),
        group=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        trained=np.array([one.trained and not greedy for one, greedy in zip(trajectories, first, strict=True)]),
        greedy=np.array(first),
        values=np.array([value for one in trajectories for value in one.values]),
    )


def estimated(name: str, groups: Groups, choice: AdvantageSettings = plain) -> list[float]:
    return load_estimator(name)(reward_batch(groups, greedy_first=name == "remax"), choice).advantages.tolist()


def everywhere(groups: Groups, worth: Callable[[Sequence[Sampled], Sampled, int], float]) -> list[float]:
    """`worth` of a trajectory among its siblings, at each of its tokens."""
    return [
        worth(group, one, place)  #
        for group in groups
        for place, one in enumerate(group)
        for _ in one.rewards
    ]


def by_grpo(group: Sequence[Sampled], one: Sampled, place: int) -> float:
    outcomes = [each.outcome for each in group]
    if max(outcomes) == min(outcomes):
        return 0.0
    return (one.outcome - fmean(outcomes)) / (stdev(outcomes) + 1e-4)


def by_dr_grpo(group: Sequence[Sampled], one: Sampled, place: int) -> float:
    return one.outcome - fmean(each.outcome for each in group)


def by_rloo(group: Sequence[Sampled], one: Sampled, place: int) -> float:
    return one.outcome - fmean(each.outcome for other, each in enumerate(group) if other != place)


def by_remax(group: Sequence[Sampled], one: Sampled, place: int) -> float:
    return one.outcome - group[0].outcome


def to_go(rewards: Sequence[float], discount: float) -> list[float]:
    return [
        math.fsum(discount ** (later - place) * rewards[later] for later in range(place, len(rewards)))
        for place in range(len(rewards))
    ]


def generalised(one: Sampled, discount: float, trace: float) -> list[float]:
    values = [*one.values, 0.0]
    errors = [reward + discount * values[t + 1] - values[t] for t, reward in enumerate(one.rewards)]
    return to_go(errors, discount * trace)


def normalised(values: Sequence[float]) -> list[float]:
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    return [(value - fmean(values)) / (stdev(values) + 1e-8) for value in values]


@pytest.mark.parametrize(
    ("name", "choice", "oracle"),
    [
        ("grpo", plain, by_grpo),
        ("grpo", AdvantageSettings(std=False), by_dr_grpo),
        ("rloo", plain, by_rloo),
        ("remax", plain, by_remax),
    ],
)
@examples(100)
@given(groups=some_groups)
def test_siblings_are_compared_as_published(
    name: str, choice: AdvantageSettings, oracle: Callable[[Sequence[Sampled], Sampled, int], float], groups: Groups
) -> None:
    assert estimated(name, groups, choice) == pytest.approx(everywhere(groups, oracle), rel=1e-9, abs=1e-9)


@examples(100)
@given(some_groups, st.floats(0.5, 1.0))
def test_reinforce_pp_normalises_over_the_batch(groups: Groups, discount: float) -> None:
    rewards = [to_go(one.rewards, discount) for group in groups for one in group]
    found = estimated("reinforce_pp", groups, AdvantageSettings(discount=discount))
    flat = [value for one in rewards for value in one]
    # Where all returns are equal but for rounding, so is what the rounding left.
    if max(flat) == min(flat) or stdev(flat) > 1e-6:
        assert found == pytest.approx(normalised(flat), rel=1e-9, abs=1e-9)
    gaps = everywhere(groups, by_dr_grpo)
    if stdev(gaps) > 1e-6:
        found = estimated("reinforce_pp_baseline", groups)
        assert found == pytest.approx(normalised(gaps), rel=1e-9, abs=1e-9)


@examples(150)
@given(some_groups, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_generalised_advantages_are_the_sums_of_the_errors(groups: Groups, discount: float, trace: float) -> None:
    choice = AdvantageSettings(discount=discount, trace=trace, whiten=False)
    found = load_estimator("gae")(reward_batch(groups), choice)
    trajectories = [one for group in groups for one in group]
    expected = [value for one in trajectories for value in generalised(one, discount, trace)]
    assert found.advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    before = [value for one in trajectories for value in one.values]
    assert found.returns is not None
    learnt = [advantage + value for advantage, value in zip(expected, before, strict=True)]
    assert found.returns.tolist() == pytest.approx(learnt, rel=1e-9, abs=1e-9)
    white = load_estimator("gae")(reward_batch(groups), choice.model_copy(update={"whiten": True}))
    if max(expected) - min(expected) > 1e-3:
        assert white.advantages.tolist() == pytest.approx(normalised(expected), rel=1e-9, abs=1e-9)
    assert white.returns is not None and white.returns.tolist() == found.returns.tolist()


@examples(100)
@given(st.lists(st.lists(number, max_size=6), max_size=6), st.floats(0.0, 1.0))
def test_sums_to_the_end_stay_within_their_run(runs: list[list[float]], factor: float) -> None:
    flat = np.array([value for run in runs for value in run])
    found = discounted_sums(flat, np.array([len(run) for run in runs], dtype=np.int64), factor)
    expected = [value for run in runs for value in to_go(run, factor)]
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("reward", [0.1, 1.0, -7.3])
def test_equal_rewards_are_exactly_no_signal(name: str, reward: float) -> None:
    """Exactly, so that the group can be skipped: three times 0.1 has a mean that is not 0.1."""
    same = [[Sampled((reward,), (0.0,))] * 3, [Sampled((0.0, reward), (0.0, 0.0))] * 2]
    choice = plain if name != "reinforce_pp" else AdvantageSettings(discount=1.0)
    assert estimated(name, same, choice) == [0.0] * 7


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_one_alone_has_nothing_to_be_compared_with(name: str) -> None:
    assert ADVANTAGES[name].compares
    with pytest.raises(ValueError, match="no siblings"):
        estimated(name, [[Sampled((1.0,), (0.0,))]])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_token_at_all_is_a_batch_too(name: str) -> None:
    """Everything that was sampled may lie in no segment: the rewards are compared all the same."""
    silent = RewardBatch(
        outcomes=np.array([0.0, 1.0]),
        rewards=np.zeros(0),
        trajectory=np.zeros(0, dtype=np.int64),
        group=np.zeros(2, dtype=np.int64),
        trained=np.array([name != "remax", True]),
        greedy=np.array([name == "remax", False]),
        columns=dict.fromkeys(ADVANTAGES[name].columns, np.zeros(0)),
    )
    assert load_estimator(name)(silent, plain).advantages.shape == (0,)


def test_a_silent_sibling_is_compared_with() -> None:
    """It sampled no token, so that it gives no gradient, but its reward belongs to the mean."""
    heard = RewardBatch(
        outcomes=np.array([0.0, 3.0, 0.0]),
        rewards=np.array([1.0, 2.0, 0.0]),
        trajectory=np.array([1, 1, 2]),
        group=np.zeros(3, dtype=np.int64),
        trained=np.ones(3, dtype=np.bool_),
        greedy=np.zeros(3, dtype=np.bool_),
    )
    assert load_estimator("rloo")(heard, plain).advantages.tolist() == [3.0, 3.0, -1.5]


def test_statistics_of_the_batch_are_of_what_is_trained() -> None:
    loud = [Sampled((1.0,), (0.0,)), Sampled((3.0,), (0.0,)), Sampled((99.0,), (0.0,), trained=False)]
    found = estimated("reinforce_pp", [loud])
    assert found[:2] == pytest.approx([-(0.5**0.5), 0.5**0.5])
    everything = estimated("reinforce_pp", [[replace(one, trained=True) for one in loud]])
    assert everything[:2] != pytest.approx(found[:2])


def test_a_group_without_its_baseline_is_refused() -> None:
    pair = [Sampled((1.0,), (0.0,)), Sampled((0.0,), (0.0,))]
    with pytest.raises(ValueError, match="has not one greedy sibling"):
        load_estimator("remax")(reward_batch([pair]), plain)


def test_gae_without_values_is_refused() -> None:
    bare = replace(reward_batch([[Sampled((1.0,), (0.0,)), Sampled((0.0,), (0.0,))]]), values=np.zeros(0))
    with pytest.raises(ValueError, match="needs a critic"):
        load_estimator("gae")(bare, plain)
