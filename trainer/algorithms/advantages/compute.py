"""Advantage computation: how much better than expected each token of a batch did, once, before the batch is trained on.

    groups ──► reference logprobs, critic's values (where asked for) ──► RewardBatch ──► estimator ──► Credit a trajectory

Depends on the batch, the critic and the price of the cost alone: a trainer that restores these finds the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.config.algorithm import AdvantageSettings
from services.policies.batching import Group
from services.wire.errors import UsageError
from services.wire.packed import Float32Array, unpack_logprobs
from services.wire.run_metrics import CreditStatistics
from services.wire.trajectory import Segment, Trajectory
from trainer.algorithms.advantages.batch import Float64Array, Int64Array
from trainer.algorithms.advantages.registry import find_estimator, load_estimator
from trainer.algorithms.advantages.rewards import Batch, CostPrice, score
from trainer.algorithms.describe import describe_advantage
from trainer.algorithms.divergence import Estimator, divergence

Measure = Callable[[Sequence[Trajectory]], Float64Array]
"""Something known of each sampled token of some trajectories, flat, in the order of their segments: `[N]`."""


@dataclass(frozen=True)
class Credit:
    """Of one trajectory's segments, each `[n]` for a segment's n tokens, 0 where the policy did not generate the token.

    `values`: a critic's before the batch; `returns`: what they should have been. None without a critic.
    """

    advantages: list[Float32Array]
    values: list[Float32Array] | None = None
    returns: list[Float32Array] | None = None


Credits = Mapping[str, Credit]
"""By entry of the stream. A trajectory without one is only compared with, and not trained."""


class AdvantageComputer:
    """Raises UsageError for settings of which one would have no effect, or for a measure that they need and do not get.

    `seed`: the run's. `reference`: logprobs of the run's first policy; `critic`: values; where the settings need them.
    """

    def __init__(
        self,
        settings: AdvantageSettings,
        seed: int = 0,
        *,
        reference: Measure | None = None,
        critic: Measure | None = None,
    ) -> None:
        self.formula = describe_advantage(settings)
        self.price = CostPrice(settings.cost) if settings.cost.component is not None else None
        self._settings, self._seed = settings, seed
        self._estimate = load_estimator(settings.estimator)
        self._reference = _needed(
            reference, settings.kl > 0.0, "trainer.advantage.kl needs the policy that the run began with"
        )
        needs_critic = find_estimator(settings.estimator).critic
        self._critic = _needed(critic, needs_critic, f"trainer.advantage.estimator={settings.estimator} needs a critic")

    def of(self, groups: Sequence[Group[Trajectory]]) -> tuple[dict[str, Credit], CreditStatistics]:
        """What each trajectory that is trained gets, and statistics of the whole. The groups are those of one batch."""
        batch = Batch.of(groups)
        kl = None if self._reference is None else self._divergence(batch, self._reference)
        values = None if self._critic is None else self._critic(batch.trajectories)
        penalty = None if kl is None else self._settings.kl * kl
        reward_batch = score(batch, self._settings, self._seed, self.price, penalty, values)
        found = self._estimate(reward_batch, self._settings)
        entries = [member.entry for group in groups for member in group.members]
        credits = {
            entry: credit
            for entry, credit, trained in zip(
                entries, _cut(batch, found.advantages, values, found.returns), reward_batch.trained, strict=True
            )
            if trained
        }
        costs = self._costs(batch.trajectories)
        return credits, CreditStatistics(
            kl_in_reward=float(kl.mean()) if kl is not None and len(kl) else None,
            cost_mean=float(np.mean(costs)) if costs else None,
            cost_price=None if self.price is None else self.price.value,
            left_out=len(entries) - len(credits),
        )

    def learn(self, groups: Sequence[Group[Trajectory]]) -> None:
        """The batch is over: the price of the cost follows what it cost."""
        if self.price is not None:
            self.price.learn(self._costs([member.payload for group in groups for member in group.members]))

    def _costs(self, trajectories: Sequence[Trajectory]) -> list[float]:
        if self.price is None:
            return []
        sampled = (one for one in trajectories if not (self._settings.greedy_baseline and one.member == 0))
        return [self.price.cost_of(one) for one in sampled]

    def _divergence(self, batch: Batch, reference: Measure) -> Float64Array:
        behaviour = [
            unpack_logprobs(segment.logprobs)[places].astype(np.float64)
            for trajectory, segments in zip(batch.trajectories, batch.places, strict=True)
            for segment, places in zip(trajectory.segments, segments, strict=True)
        ]
        sampled = np.concatenate(behaviour) if behaviour else np.zeros(0)
        return divergences(sampled, reference(batch.trajectories), self._settings.kl_estimator)


def _needed(measure: Measure | None, needed: bool, what: str) -> Measure | None:
    if needed and measure is None:
        raise UsageError(what, "give it to the AdvantageComputer")
    return measure if needed else None


def _cut(
    batch: Batch, advantages: Float64Array, values: Float64Array | None, returns: Float64Array | None
) -> list[Credit]:
    columns = [None if flat is None else _segments(batch, flat) for flat in (advantages, values, returns)]
    worth = columns[0] or []
    return [
        Credit(worth[index], *(None if column is None else column[index] for column in columns[1:]))
        for index in range(len(worth))
    ]


def _segments(batch: Batch, flat: Float64Array) -> list[list[Float32Array]]:
    """For each trajectory and segment an array of the segment's length."""
    return [
        [
            _scattered(segment, places, piece)
            for segment, places, piece in zip(trajectory.segments, segments, pieces, strict=True)
        ]
        for trajectory, segments, pieces in zip(batch.trajectories, batch.places, batch.by_segment(flat), strict=True)
    ]


def _scattered(segment: Segment, places: Int64Array, piece: Float64Array) -> Float32Array:
    whole = np.zeros(len(segment.loss_mask), dtype=np.float32)
    whole[places] = piece
    return whole


def divergences(behaviour: Float64Array, reference: Float64Array, estimator: Estimator) -> Float64Array:
    """KL penalty in the reward (Ziegler et al. 2019, arXiv:1909.08593, section 2; Ouyang et al. 2022, arXiv:2203.02155).

        r_t = reward_t − β · D_t          D_t: k1, k2 or k3 (`trainer.algorithms.divergence`) at a sampled token

    Returns D `[N]` of logprobs `[N]`. The engine's policy sampled the token, so its logprob is compared: no forward pass
    but the reference's. 0 where both say that the token could not be sampled: they do not differ there.
    """
    found = divergence(torch.from_numpy(behaviour), torch.from_numpy(reference), estimator)
    known: Float64Array = np.nan_to_num(found.numpy(), nan=0.0)
    return known
