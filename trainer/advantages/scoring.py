"""Groups of trajectories become what an estimator sees: rewards are fined, charged and placed at tokens.

    reward ── + fine for length ── less the price of its cost ── at its tokens ── less β · divergence ──► Scored

A call's reward stands at the call's last token; whatever else there is, at the trajectory's last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.config.algorithm import AdvantageSettings
from services.policies.batching import Group
from services.wire.trajectory import Segment, Trajectory
from trainer.advantages.lagrangian import CostPrice
from trainer.advantages.overlong import overlong_fine
from trainer.advantages.policy_filter import kept
from trainer.advantages.scored import BoolArray, Float64Array, Int64Array, Scored


@dataclass(frozen=True)
class Batch:
    """`T` trajectories in the order of their groups, and where in their segments the `N` sampled tokens stand.

    `places`: for each trajectory and each of its segments the positions of sampled tokens, int64, ascending.
    """

    groups: Sequence[Group[Trajectory]]
    trajectories: list[Trajectory]
    group: Int64Array
    places: list[list[Int64Array]]

    @staticmethod
    def of(groups: Sequence[Group[Trajectory]]) -> Batch:
        trajectories = [member.payload for group in groups for member in group.members]
        number = np.repeat(np.arange(len(groups)), [len(group.members) for group in groups])
        places = [[sampled_places(segment) for segment in one.segments] for one in trajectories]
        return Batch(groups, trajectories, number, places)

    @property
    def lengths(self) -> Int64Array:
        """`[T]`: sampled tokens of each trajectory."""
        return np.array([sum(len(segment) for segment in one) for one in self.places], dtype=np.int64)

    def by_segment(self, flat: Float64Array) -> list[list[Float64Array]]:
        """`[N]` cut up: for each trajectory and segment what stands at its sampled tokens."""
        sizes = [len(segment) for one in self.places for segment in one]
        pieces = iter(np.split(flat, np.cumsum(sizes)[:-1]) if sizes else [])
        return [[next(pieces) for _ in one] for one in self.places]


def sampled_places(segment: Segment) -> Int64Array:
    """Positions in the segment that the policy drew."""
    runs = [np.arange(span.start, span.start + span.length) for span in segment.version_spans]
    return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


def score(
    batch: Batch,
    settings: AdvantageSettings,
    seed: int,
    price: CostPrice | None,
    penalty: Float64Array | None,
    values: Float64Array | None,
) -> Scored:
    """`penalty`: `[N]`, what each token's reward is less by (β · divergence); `values`: `[N]`, a critic's."""
    outcomes = np.array([_outcome(one, settings, price) for one in batch.trajectories])
    scale = 1.0 if price is None else 1.0 / (1.0 + price.value)
    lengths = batch.lengths
    rewards = np.zeros(int(lengths.sum()))
    begins = np.cumsum(lengths) - lengths
    for index, trajectory in enumerate(batch.trajectories):
        if lengths[index]:
            own = rewards[begins[index] : begins[index] + lengths[index]]
            _place(trajectory, batch.places[index], scale, own)
            own[-1] += outcomes[index] - own.sum()
    owner = np.repeat(np.arange(len(outcomes)), lengths)
    if penalty is not None:
        rewards -= penalty
        outcomes = outcomes - np.bincount(owner, penalty, minlength=len(outcomes))
    greedy = np.array([settings.greedy_baseline and one.member == 0 for one in batch.trajectories], dtype=np.bool_)
    return Scored(
        outcomes=outcomes,
        rewards=rewards,
        trajectory=owner,
        group=batch.group,
        trained=_trained(batch, settings, seed, outcomes, greedy),
        greedy=greedy,
        values=np.zeros(0) if values is None else values,
    )


def _outcome(trajectory: Trajectory, settings: AdvantageSettings, price: CostPrice | None) -> float:
    reward = trajectory.reward + overlong_fine(trajectory.sampled_tokens(), settings)
    return reward if price is None else price.charged(reward, price.cost_of(trajectory))


def _place(trajectory: Trajectory, places: list[Int64Array], scale: float, own: Float64Array) -> None:
    """Rewards of calls at their last tokens; one whose token was not drawn in its segment stays in the rest."""
    first = np.cumsum([0, *(len(segment) for segment in places)])
    for span in trajectory.reward_spans:
        drawn, last = places[span.segment], span.start + span.length - 1
        found = int(np.searchsorted(drawn, last))
        if found < len(drawn) and drawn[found] == last:
            own[first[span.segment] + found] += scale * span.reward


def _trained(
    batch: Batch, settings: AdvantageSettings, seed: int, outcomes: Float64Array, greedy: BoolArray
) -> BoolArray:
    trained = ~greedy
    for number, group in enumerate(batch.groups):
        siblings = np.flatnonzero((batch.group == number) & ~greedy)
        trained[siblings] = kept(outcomes[siblings], settings.keep, seed, group.ordinal)
    return trained
