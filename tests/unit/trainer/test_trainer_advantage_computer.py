"""Advantages of groups: length penalties, costs, divergences and filters as published, each at the right token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.training.algorithm import AdvantageSettings, CostSettings
from services.wire.errors import UsageError
from services.wire.trajectory import RewardSpan, Trajectory
from tests.support.examples import examples
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.algorithms.advantages.batch import Float64Array
from trainer.algorithms.advantages.compute import AdvantageComputer, Credit, divergences
from trainer.algorithms.advantages.rewards import Batch, CostPrice, Keep, kept, overlong_fine, score
from trainer.data.rows import rows_of

logprob = st.floats(-12.0, -1e-3)


def turns(*rewards: float, lengths: Sequence[int] = (3, 2), costs: Sequence[float] = ()) -> list[Trajectory]:
    """A group: two segments each, of so many sampled tokens, the first with an environment's token in between."""
    made = []
    for member, reward in enumerate(rewards):
        first = a_segment([2, 3], [4] * lengths[0], [-1.0 - member] * lengths[0], [0] * lengths[0])
        second = a_segment([5], [6] * lengths[1], [-0.5] * lengths[1], [0] * lengths[1])
        one = a_rollout([first, second], reward, size=len(rewards), member=member)
        components = {"harm": costs[member]} if costs else {}
        made.append(msgspec.structs.replace(one, reward_components=components))
    return made


@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 40))
def test_the_fine_for_length_is_that_of_dapo(tokens: int, longest: int, buffer: int) -> None:
    buffer = min(buffer, longest)
    fine = overlong_fine(tokens, AdvantageSettings(overlong_length=longest, overlong_buffer=buffer))
    if tokens <= longest - buffer:
        assert fine == 0.0
    elif tokens <= longest:
        assert fine == pytest.approx(((longest - buffer) - tokens) / buffer, rel=1e-12)
    else:
        assert fine == -1.0


@examples(200)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=2, max_size=6), st.integers(0, 9), st.integers(0, 9))
def test_the_filter_keeps_whose_reward_is_reliable(rewards: list[float], seed: int, ordinal: int) -> None:
    values = np.array(rewards)
    chosen = {keep: np.flatnonzero(kept(values, keep, seed, ordinal)) for keep in ("all", "best")}
    assert chosen["all"].tolist() == [*range(len(rewards))]
    (best,) = chosen["best"]
    assert rewards[best] == max(rewards)
    pairs: tuple[Keep, ...] = ("best_worst", "best_random")
    for keep in pairs:
        two = np.flatnonzero(kept(values, keep, seed, ordinal))
        assert len(two) == 2 and best in two
        assert two.tolist() == np.flatnonzero(kept(values, keep, seed, ordinal)).tolist()
    worst = set(np.flatnonzero(kept(values, "best_worst", seed, ordinal)).tolist()) - {best}
    assert {rewards[index] for index in worst} == {min(rewards)}


def test_the_random_sibling_is_another_for_another_group_or_seed() -> None:
    values = np.array([1.0, *[0.0] * 40])
    sampled = {
        tuple(np.flatnonzero(kept(values, "best_random", seed, ordinal)).tolist())
        for seed in range(4)
        for ordinal in range(4)
    }
    assert len(sampled) > 10


@examples(100)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=2, max_size=5),
    st.floats(0.1, 3.0),
    st.floats(-1.0, 1.0),
    st.floats(0.01, 1.0),
)
def test_a_cost_has_the_price_that_safe_rlhf_gives_it(
    pairs: list[tuple[float, float]], price: float, limit: float, rate: float
) -> None:
    settings_ = CostSettings(component="harm", price=price, limit=limit, learning_rate=rate, largest=4.0)
    found = CostPrice(settings_)
    for reward, cost in pairs:
        expected = reward / (1 + price) - price / (1 + price) * cost
        assert found.charged(reward, cost) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    costs = [cost for _, cost in pairs]
    found.learn(costs)
    grown = price * math.exp(rate * price * (fmean(costs) - limit))
    assert found.value == pytest.approx(min(grown, 4.0), rel=1e-9)


def test_a_price_rises_while_the_cost_is_too_high_and_falls_after() -> None:
    advantage_computer = AdvantageComputer(
        AdvantageSettings(cost=CostSettings(component="harm", limit=0.5, learning_rate=0.5))
    )
    assert advantage_computer.price is not None
    prices = []
    for cost in (1.0, 1.0, 1.0, 0.0, 0.0):
        groups = grouped(turns(1.0, 0.0, costs=(cost, cost)))
        _, statistics = advantage_computer.of(groups)
        assert (statistics.cost_mean, statistics.cost_price) == (cost, advantage_computer.price.value)
        advantage_computer.learn(groups)
        prices.append(advantage_computer.price.value)
    assert prices[0] < prices[1] < prices[2] > prices[3] > prices[4]
    with pytest.raises(UsageError, match="has no reward component 'harm'"):
        advantage_computer.of(grouped(turns(1.0, 0.0)))


@examples(100)
@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8))
def test_divergences_in_the_reward_are_their_formulas(pairs: list[tuple[float, float]]) -> None:
    sampled, first = (np.array(column) for column in zip(*pairs, strict=True))
    gaps = [a - b for a, b in pairs]
    assert divergences(sampled, first, "k1").tolist() == pytest.approx(gaps, rel=1e-9, abs=1e-9)
    assert divergences(sampled, first, "k2").tolist() == pytest.approx([g * g / 2 for g in gaps], rel=1e-9, abs=1e-9)
    k3 = [math.exp(-g) - 1 + g for g in gaps]
    assert divergences(sampled, first, "k3").tolist() == pytest.approx(k3, rel=1e-9, abs=1e-9)


def test_divergences_stay_numbers_where_logprobs_are_not() -> None:
    sampled, first = np.array([-math.inf, -1.0, -math.inf]), np.array([-math.inf, -math.inf, -1.0])
    for estimator in ("k1", "k2", "k3"):
        found = divergences(sampled, first, estimator)  # type: ignore[arg-type]
        assert np.isfinite(found).all() and found[0] == 0.0


def test_the_divergence_is_taken_off_at_each_token() -> None:
    """With return-to-go each token answers for the divergence from itself on, as REINFORCE++ has it."""
    played = turns(1.0, 0.0, lengths=(2, 1))
    reference = np.array([-1.5, -0.5, -1.5, -2.0, -1.0, -0.25])
    seen: list[Sequence[Trajectory]] = []

    def of_reference(trajectories: Sequence[Trajectory]) -> Float64Array:
        seen.append(trajectories)
        return reference

    beta = 0.25
    choice = AdvantageSettings(estimator="reinforce_pp", kl=beta)
    credits, statistics = AdvantageComputer(choice, reference=of_reference).of(grouped(played))
    gaps = [(-1.0, -1.5), (-1.0, -0.5), (-0.5, -1.5), (-2.0, -2.0), (-2.0, -1.0), (-0.5, -0.25)]
    delta = [sampled - first for sampled, first in gaps]
    assert statistics.kl_in_reward == pytest.approx(fmean(delta))
    returns = [1.0 - beta * sum(delta[place:3]) for place in range(3)]
    returns += [0.0 - beta * sum(delta[place:]) for place in range(3, 6)]
    spread = float(np.std(returns, ddof=1))
    expected = [(value - fmean(returns)) / (spread + 1e-8) for value in returns]
    found = [credits[f"g0-{member}"].advantages for member in range(2)]
    flat = [*found[0][0][2:], *found[0][1][1:], *found[1][0][2:], *found[1][1][1:]]
    assert [float(value) for value in flat] == pytest.approx(expected, rel=1e-6)
    # Environment's tokens, and prompts, earn nothing.
    assert all(float(each) == 0.0 for pair in found for each in (*pair[0][:2], *pair[1][:1]))
    assert len(seen) == 1
    with pytest.raises(UsageError, match="needs the policy that the run began with"):
        AdvantageComputer(choice)


def test_rewards_of_calls_stand_at_their_calls() -> None:
    first, second = turns(3.0, 0.0)
    spans = [RewardSpan(0, 2, 2, 0.5), RewardSpan(1, 1, 1, 1.5), RewardSpan(0, 0, 2, 7.0)]
    first = msgspec.structs.replace(first, reward_spans=spans)
    batch = Batch.of(grouped([first, second]))
    reward_batch = score(batch, AdvantageSettings(), 0, None, None, None)
    # The last span ends on a prompt's token, as where another way through the tree sampled it: it counts at the end.
    assert reward_batch.rewards.tolist() == [0.0, 0.5, 0.0, 1.5, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert reward_batch.outcomes.tolist() == [3.0, 0.0]
    charged = score(
        Batch.of(grouped(turns(3.0, 1.0, costs=(1.0, 0.0)))),
        AdvantageSettings(cost=CostSettings(component="harm")),
        0,
        CostPrice(CostSettings(component="harm")),
        None,
        None,
    )
    assert charged.outcomes.tolist() == [1.0, 0.5]


@examples(60)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=2, max_size=5), st.integers(0, 4))
def test_who_is_filtered_is_compared_with_and_not_trained(rewards: list[float], seed: int) -> None:
    choice = AdvantageSettings(estimator="rloo", keep="best_random")
    groups = grouped(turns(*rewards))
    credits, statistics = AdvantageComputer(choice, seed).of(groups)
    everybody, _ = AdvantageComputer(AdvantageSettings(estimator="rloo")).of(groups)
    assert len(credits) == 2 and statistics.left_out == len(rewards) - 2
    for entry, credit in credits.items():
        assert [piece.tolist() for piece in credit.advantages] == [
            piece.tolist() for piece in everybody[entry].advantages
        ]
    rows, tally = rows_of(groups, 0, 0, credits, skip_idle=False)
    assert (len(rows), tally.fresh) == (4, 10)


def test_a_greedy_baseline_is_never_trained() -> None:
    groups = grouped(turns(1.0, 3.0, 0.0))
    credits, statistics = AdvantageComputer(AdvantageSettings(estimator="remax")).of(groups)
    assert sorted(credits) == ["g0-1", "g0-2"] and statistics.left_out == 1
    assert credits["g0-1"].advantages[0].tolist() == [0.0, 0.0, 2.0, 2.0, 2.0]
    assert credits["g0-2"].advantages[1].tolist() == [0.0, -1.0, -1.0]
    rows, tally = rows_of(groups, 0, 0, credits)
    assert (len(rows), tally.segments, tally.fresh) == (4, 4, 10)


def test_rows_without_a_signal_are_kept_where_somebody_learns_from_them() -> None:
    groups = grouped(turns(1.0, 1.0))
    credits, _ = AdvantageComputer(AdvantageSettings()).of(groups)
    skipped, counted = rows_of(groups, 0, 0, credits)
    everything, same = rows_of(groups, 0, 0, credits, skip_idle=False)
    assert (len(skipped), len(everything)) == (0, 4)
    assert (counted.fresh, counted.segments) == (same.fresh, same.segments) == (10, 4)


def test_trajectories_without_credit_are_left_out() -> None:
    groups = grouped(turns(1.0, 0.0))
    one: dict[str, Credit] = {"g0-1": AdvantageComputer(AdvantageSettings()).of(groups)[0]["g0-1"]}
    rows, tally = rows_of(groups, 0, 0, one)
    assert (len(rows), tally.fresh) == (2, 5)
