"""Clip, scale and running normalisation of the environments' rewards, before penalties and costs.

    R' = scale · clip(R, low, high)                              normalise = false
    R' = scale · (clip(R, low, high) − μ)/(σ + 1e-8)             normalise = true

μ and σ are of the clipped rewards of one task in all batches so far, this one included: σ² = Σ(R − μ)²/n. They are
accumulated as Welford (1962) does, batches merged as Chan, Golub and LeVeque (1979) do, equation 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.config.training.algorithm import RewardShaping
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import Float64Array

_EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Of `count` rewards. `squares`: Σ(R − mean)²."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 1.0

    def merged(self, values: Float64Array) -> Moments:
        """With more rewards, `[n]`."""
        count = len(values)
        if not count:
            return self
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        both, apart = self.count + count, mean - self.mean
        return Moments(
            both,
            self.mean + apart * count / both,
            self.squares + squares + apart * apart * self.count * count / both,
        )


class RewardShaper:
    """Shapes the rewards of batches. `by_task`: the moments of all batches that were learned, which a checkpoint keeps.

    `leaves_out_first`: a group's first sibling is a greedy baseline, whose reward is shaped, and not learned from.
    """

    def __init__(self, settings: RewardShaping, *, leaves_out_first: bool = False) -> None:
        self._settings, self._leaves_out_first = settings, leaves_out_first
        self.by_task: dict[str, Moments] = {}

    @property
    def remembers(self) -> bool:
        """Whether what it does depends on batches before."""
        return self._settings.normalise

    def of(self, trajectories: Sequence[Trajectory]) -> tuple[Float64Array, Float64Array]:
        """Shaped rewards `[T]` of one batch, and what a reward of 1 is multiplied by `[T]`."""
        rewards = self._clipped(trajectories)
        factors = np.full(len(rewards), self._settings.scale)
        if not self._settings.normalise:
            return factors * rewards, factors
        after = self._after(trajectories)
        means = np.array([after[one.task].mean for one in trajectories])
        factors = factors / np.array([after[one.task].std + _EPSILON for one in trajectories])
        return factors * (rewards - means), factors

    def learn(self, trajectories: Sequence[Trajectory]) -> None:
        """The batch is over."""
        if self._settings.normalise:
            self.by_task = self._after(trajectories)

    def _after(self, trajectories: Sequence[Trajectory]) -> dict[str, Moments]:
        rewards, tasks = self._clipped(trajectories), np.array([one.task for one in trajectories])
        counts = np.array([not (self._leaves_out_first and one.member == 0) for one in trajectories])
        found = dict(self.by_task)
        for task in sorted({one.task for one in trajectories}):
            found[task] = found.get(task, Moments()).merged(rewards[counts & (tasks == task)])
        return found

    def _clipped(self, trajectories: Sequence[Trajectory]) -> Float64Array:
        rewards = np.array([one.reward for one in trajectories], dtype=np.float64)
        return rewards if self._settings.clip is None else np.clip(rewards, *self._settings.clip)
