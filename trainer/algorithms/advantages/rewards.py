"""Reward shaping: from groups of trajectories to the `RewardBatch` that an estimator takes.

    reward ── shaped ── + length penalty ── − λ · cost ── placed at tokens ── − β · divergence ──► RewardBatch

The reward of a call is placed at the call's last token; the rest of a trajectory's reward at its last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from services.config.training.algorithm import AdvantageSettings, CostSettings
from services.policies.batching import Group
from services.wire.errors import UsageError
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import BoolArray, Column, Float64Array, Int64Array, RewardBatch
from trainer.algorithms.advantages.flat import FlatSegments
from trainer.algorithms.advantages.shaping import RewardShaper
from trainer.algorithms.columns import AdvantageColumn


@dataclass(frozen=True)
class Batch:
    """`T` trajectories in the order of their groups, with their `S` segments.

    `entries` `[T]`: of the stream; `group` int64 `[T]`, from 0; `owner` int64 `[S]`: the trajectory of each segment.
    """

    groups: Sequence[Group[Trajectory]]
    entries: list[str]
    trajectories: list[Trajectory]
    group: Int64Array
    segments: FlatSegments
    owner: Int64Array

    @staticmethod
    def of(groups: Sequence[Group[Trajectory]]) -> Batch:
        members = [member for group in groups for member in group.members]
        trajectories = [member.payload for member in members]
        number = np.repeat(np.arange(len(groups)), [len(group.members) for group in groups])
        segments = FlatSegments.of([segment for one in trajectories for segment in one.segments])
        owner = np.repeat(np.arange(len(trajectories)), [len(one.segments) for one in trajectories])
        return Batch(groups, [member.entry for member in members], trajectories, number, segments, owner)

    @cached_property
    def lengths(self) -> Int64Array:
        """`[T]`: sampled tokens of each trajectory."""
        of_segments = self.segments.sampled_tokens()
        lengths: Int64Array = np.bincount(self.owner, of_segments, len(self.trajectories)).astype(np.int64)
        return lengths


def score(
    batch: Batch,
    settings: AdvantageSettings,
    seed: int,
    price: CostPrice | None,
    penalty: Float64Array | None,
    values: Float64Array | None,
    columns: Mapping[AdvantageColumn, Column] = MappingProxyType({}),
    shaper: RewardShaper | None = None,
) -> RewardBatch:
    """`penalty`: `[N]`, subtracted from each token's reward (β · divergence); `values`: `[N]`, a critic's; `columns`:
    `[N]` each, of the estimator; `shaper`: with what batches before have taught it, None where there were none."""
    lengths = batch.lengths
    shaped, factors = (shaper or RewardShaper(settings.reward)).of(batch.trajectories)
    fined = zip(batch.trajectories, shaped.tolist(), lengths.tolist(), strict=True)
    outcomes = np.array(
        [_outcome(one, reward, length, settings, price) for one, reward, length in fined], dtype=np.float64
    )
    rewards = np.zeros(int(lengths.sum()))
    spoken = np.flatnonzero(lengths)
    ends = np.cumsum(lengths)
    rewards[ends[spoken] - 1] += outcomes[spoken]
    if any(one.reward_spans for one in batch.trajectories):
        _place_calls(batch, factors if price is None else factors / (1.0 + price.value), ends, rewards)
    owner = np.repeat(np.arange(len(outcomes)), lengths)
    if penalty is not None:
        rewards -= penalty
        outcomes = outcomes - np.bincount(owner, penalty, minlength=len(outcomes))
    greedy = np.array([settings.greedy_baseline and one.member == 0 for one in batch.trajectories], dtype=np.bool_)
    return RewardBatch(
        outcomes=outcomes,
        rewards=rewards,
        trajectory=owner,
        group=batch.group,
        trained=_trained(batch, settings, seed, outcomes, greedy),
        greedy=greedy,
        values=np.zeros(0) if values is None else values,
        columns=columns,
    )


RIGHT = 0.5
"""An answer of at least this success is a right one."""


def success_of(trajectory: Trajectory) -> float:
    """The reward component `success`; of an environment that has none, whether the reward is above 0."""
    return trajectory.reward_components.get("success", float(trajectory.reward > 0))


def _outcome(
    trajectory: Trajectory, shaped: float, tokens: int, settings: AdvantageSettings, price: CostPrice | None
) -> float:
    reward = shaped + overlong_fine(tokens, settings)
    return reward if price is None else price.charged(reward, price.cost_of(trajectory))


def _place_calls(batch: Batch, scales: Float64Array, ends: Int64Array, rewards: Float64Array) -> None:
    """Rewards of calls at their last tokens, the rest of a trajectory's at its last one, where all of it stands before.

    A call whose last token was not sampled in its segment counts to the rest. `scales`: `[T]`, of rewards of calls;
    `ends`: where in `rewards` trajectories end.
    """
    sampled, begins = batch.segments.places, batch.segments.begins
    firsts = np.searchsorted(batch.owner, np.arange(len(batch.trajectories)))
    for index, trajectory in enumerate(batch.trajectories):
        own = rewards[ends[index] - batch.lengths[index] : ends[index]]
        if not trajectory.reward_spans or not len(own):
            continue
        whole, own[-1] = float(own[-1]), 0.0
        for span in trajectory.reward_spans:
            last = begins[firsts[index] + span.segment] + span.start + span.length - 1
            found = int(np.searchsorted(sampled, last))
            if found < len(sampled) and sampled[found] == last:
                rewards[found] += scales[index] * span.reward
        own[-1] += whole - own.sum()


def _trained(
    batch: Batch, settings: AdvantageSettings, seed: int, outcomes: Float64Array, greedy: BoolArray
) -> BoolArray:
    trained = ~greedy
    if settings.keep == "all":
        return trained
    for number, group in enumerate(batch.groups):
        siblings = np.flatnonzero((batch.group == number) & ~greedy)
        trained[siblings] = kept(outcomes[siblings], settings.keep, seed, group.ordinal)
    return trained


def overlong_fine(tokens: int, settings: AdvantageSettings) -> float:
    """Soft penalty for long answers (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13); 0 without an `overlong_length`.

    0                       |y| ≤ L − C             |y| sampled tokens, L: overlong_length, C: overlong_buffer
    ((L − C) − |y|) / C     L − C < |y| ≤ L
    −1                      L < |y|
    """
    if settings.overlong_length is None:
        return 0.0
    expected = settings.overlong_length - settings.overlong_buffer
    return max(-1.0, min(0.0, (expected - tokens) / settings.overlong_buffer))


Keep = Literal["all", "best", "best_random", "best_worst"]


def kept(rewards: Float64Array, keep: Keep, seed: int, ordinal: int) -> BoolArray:
    """Policy filtration (PF-PPO, Zhang et al. 2024, arXiv:2409.06957, section 4): bool `[n]`, which siblings stay.

    best           the one with the highest reward; among equals the first
    best_worst     and the one with the lowest; among equals the last
    best_random    and one of the others, chosen at random by the run's seed and the group's ordinal: reproducible
    """
    if keep == "all" or len(rewards) < 2:
        return np.ones(len(rewards), dtype=np.bool_)
    stays = np.zeros(len(rewards), dtype=np.bool_)
    best = int(rewards.argmax())
    stays[best] = True
    others = np.delete(np.arange(len(rewards)), best)
    if keep == "best_worst":
        stays[others[len(others) - 1 - int(rewards[others][::-1].argmin())]] = True
    elif keep == "best_random":
        stays[np.random.default_rng([seed, ordinal]).choice(others)] = True
    return stays


class CostPrice:
    """Lagrange multiplier λ of the constraint mean cost ≤ d (Safe RLHF, Dai et al. 2023, arXiv:2310.12773, section 3.3).

        R'_i = (R_i − λ·C_i) / (1 + λ)
        ln λ ← ln λ + α·λ·(mean(C) − d)              after each batch; λ stays at most `largest`

    `log_value`: ln λ, which a checkpoint keeps.
    """

    def __init__(self, settings: CostSettings) -> None:
        self.log_value = math.log(settings.price)
        self._settings = settings

    @property
    def value(self) -> float:
        return math.exp(self.log_value)

    def cost_of(self, trajectory: Trajectory) -> float:
        """Raises UsageError where the environment gave no such component: a cost that is not known is not 0."""
        component = self._settings.component or ""
        if component not in trajectory.reward_components:
            raise UsageError(
                f"trajectory {trajectory.trajectory_id} has no reward component {component!r}",
                "have the environment give it with every reward, or leave trainer.advantage.cost.component out",
            )
        return trajectory.reward_components[component]

    def charged(self, reward: float, cost: float) -> float:
        """The reward less the price of the cost."""
        return (reward - self.value * cost) / (1.0 + self.value)

    def learn(self, costs: Sequence[float]) -> None:
        """One batch of trajectories is over; `costs`: what each of them cost."""
        if costs:
            excess = math.fsum(costs) / len(costs) - self._settings.limit
            raised = self.log_value + self._settings.learning_rate * self.value * excess
            self.log_value = min(math.log(self._settings.largest), raised)
