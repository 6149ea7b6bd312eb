"""Advantages of a batch of groups, computed once, before the batch is trained on.

    groups ──► reference logprobs, critic's values (where needed) ──► RewardBatch ──► estimator ──► Credit, per trajectory

Deterministic: they depend only on the batch, the critic and the cost's multiplier, all of which a checkpoint restores.
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
"""A value for each sampled token of some trajectories, flat, in the order of their segments: `[N]`."""


@dataclass(frozen=True)
class Credit:
    """Advantages of one trajectory: an array `[n]` for each segment of n tokens, 0 where a token was not sampled.

    `values`: a critic's before the batch; `returns`: their targets. None without a critic.
    """

    advantages: list[Float32Array]
    values: list[Float32Array] | None = None
    returns: list[Float32Array] | None = None


Credits = Mapping[str, Credit]
"""By stream entry. A trajectory without one serves only as a baseline, and is not trained."""


class AdvantageComputer:
    """Computes the advantages of batches. `reference`: logprobs of the run's first policy; `critic`: its values.

    Raises UsageError for a setting without effect, and for a `reference` or `critic` that is needed and missing.
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
        """Credits of the trajectories to train on, and statistics. `groups`: one batch."""
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
        """Update the cost's multiplier after a batch."""
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
        raise UsageError(what, "pass it to AdvantageComputer")
    return measure if needed else None


def _cut(
    batch: Batch, advantages: Float64Array, values: Float64Array | None, returns: Float64Array | None
) -> list[Credit]:
    absent = [None] * len(batch.trajectories)
    columns = (
        _segments(batch, advantages),
        absent if values is None else _segments(batch, values),
        absent if returns is None else _segments(batch, returns),
    )
    return [Credit(advantage, value, target) for advantage, value, target in zip(*columns, strict=True)]


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
    """KL penalty in the reward (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155, equation 2).

        r_t = reward_t − β · D_t          D_t: k1, k2 or k3 (`trainer.algorithms.divergence`) at a sampled token

    D `[N]` of logprobs `[N]`: `behaviour` is the engine's, so only the reference needs a forward pass. 0 where both
    logprobs are −∞.
    """
    found = divergence(torch.from_numpy(behaviour), torch.from_numpy(reference), estimator)
    known: Float64Array = np.nan_to_num(found.numpy(), nan=0.0)
    return known
