"""Input and output of an advantage estimator: rewards by trajectory and by token, and which trajectories form a group.

    trajectory 0        trajectory 1    trajectory 2          T = 3 trajectories of G groups
    t0 t1 t2 t3         t4 t5           (nothing sampled)     N = 6 sampled tokens, in the order they were sampled
     0  0  ½  ½          0  1                                 rewards [N]
          1                1                  ½               outcomes [T]

All arithmetic is in float64. The segments of a trajectory are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer.algorithms.columns import AdvantageColumn, declared

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Column = Float64Array | Int64Array

SMALLEST_STD = 1e-8


@dataclass(frozen=True)
class RewardBatch:
    """`outcomes`: float64 `[T]`, a trajectory's whole reward. `rewards`: float64 `[N]`, the same by token; those of a
    trajectory add up to its outcome, unless nothing was sampled. `trajectory`: int64 `[N]`, ascending, a token's
    trajectory. `group`: int64 `[T]`, ascending from 0.

    `trained`: bool `[T]`, False for those that serve only as a baseline. `greedy`: bool `[T]`, sampled greedily.
    `values`: float64 `[N]`, a critic's estimate before each token; empty without a critic. `columns`: `[N]` each, those
    that the estimator's entry names.
    """

    outcomes: Float64Array
    rewards: Float64Array
    trajectory: Int64Array
    group: Int64Array
    trained: BoolArray
    greedy: BoolArray
    values: Float64Array = field(default_factory=lambda: np.zeros(0))
    columns: Mapping[AdvantageColumn, Column] = field(default_factory=dict)

    def column(self, name: AdvantageColumn) -> Column:
        """`[N]`: a column that the estimator's entry names. Raises UsageError for another."""
        return declared(self.columns, name)

    def spread(self, of_trajectory: Float64Array) -> Float64Array:
        """`[N]`: the value of each token's trajectory."""
        return of_trajectory[self.trajectory]

    def by_group(self, judge: Callable[[Float64Array], Float64Array]) -> Float64Array:
        """`[T]`: `judge` applied to the outcomes `[n]` of each group's siblings."""
        judged = np.zeros_like(self.outcomes)
        for group in np.unique(self.group):
            siblings = np.flatnonzero(self.group == group)
            judged[siblings] = judge(self.outcomes[siblings])
        return judged

    def by_size(self, judge: Callable[[Float64Array], Float64Array]) -> Float64Array:
        """`[T]`: `judge` applied to the outcomes `[groups, n]` of all groups of `n` siblings, for each `n` at once."""
        sizes = np.bincount(self.group)
        judged, size = np.zeros_like(self.outcomes), sizes[self.group]
        for n in set(sizes.tolist()) - {0}:
            siblings = size == n
            judged[siblings] = judge(self.outcomes[siblings].reshape(-1, n)).reshape(-1)
        return judged

    @property
    def lengths(self) -> Int64Array:
        """`[T]`: sampled tokens of each trajectory."""
        found: Int64Array = np.bincount(self.trajectory, minlength=len(self.outcomes))
        return found

    def sums_to_the_end(self, values: Float64Array, factor: float | Float64Array) -> Float64Array:
        """`[N]`: S_t = x_t + factor · S_{t+1} within each trajectory, S = 0 behind its last token.

        `factor`: of all, or `[T]`, of each trajectory.
        """
        return discounted_sums(values, self.lengths, factor)

    def normalised(self, values: Float64Array) -> Float64Array:
        """`[N]`: (x − mean) / (std + 1e-8), over the tokens that are trained; std with n − 1.

        Exactly 0 where these are all equal.
        """
        over = values[self.trained[self.trajectory]]
        if not len(over) or over.min() == over.max():
            return np.zeros_like(values)
        normalised: Float64Array = (values - over.mean()) / (over.std(ddof=1) + SMALLEST_STD)
        return normalised


@dataclass(frozen=True)
class TokenAdvantages:
    """float64 `[N]` both. `returns`: target of the critic's value before each token; None without a critic."""

    advantages: Float64Array
    returns: Float64Array | None = None


def discounted_sums(values: Float64Array, lengths: Int64Array, factor: float | Float64Array) -> Float64Array:
    """S_t = x_t + factor · S_{t+1} within each run of `lengths` consecutive elements of `values` `[N]`.

    `factor`: of all runs, or of each.
    """
    sums = values.astype(np.float64, copy=True)
    last = np.cumsum(lengths) - 1
    longest_first = np.argsort(-lengths, kind="stable")
    reach, factors = lengths[longest_first], np.broadcast_to(factor, lengths.shape)[longest_first]
    for back in range(1, int(lengths.max(initial=0))):
        reaching = int(np.searchsorted(-reach, -back, side="left"))
        here = last[longest_first[:reaching]] - back
        sums[here] += factors[:reaching] * sums[here + 1]
    return sums
