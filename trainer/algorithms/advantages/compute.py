"""Advantages of a batch of groups, computed once, before the batch is trained on.

    groups ──► reference logprobs, critic's values (where needed) ──► RewardBatch ──► estimator ──► Credit, per trajectory

Deterministic: they depend only on the batch, the critic, the cost's multiplier and the moments of rewards, all of which a
checkpoint restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from services.config.training.algorithm import DISTILLATION, AdvantageSettings
from services.policies.batching import Group
from services.wire.errors import UsageError
from services.wire.packed import Float32Array
from services.wire.run_metrics import CreditStatistics
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import BoolArray, Column, Float64Array
from trainer.algorithms.advantages.opd import teacher_term
from trainer.algorithms.advantages.registry import find_estimator, make_estimator
from trainer.algorithms.advantages.rewards import Batch, CostPrice, score
from trainer.algorithms.advantages.shaping import RewardShaper
from trainer.algorithms.columns import AdvantageColumn
from trainer.algorithms.describe import describe_advantage
from trainer.algorithms.divergence import Estimator, divergence

_Changed = TypeVar("_Changed")
_PASS = "pass it to AdvantageComputer"
Measure = Callable[[Sequence[Trajectory]], Float64Array]
"""A value for each sampled token of some trajectories, flat, in the order of their segments: `[N]`."""


@dataclass(frozen=True)
class Credit:
    """Advantages of one trajectory: an array `[n]` for each segment of n tokens, 0 where a token was not sampled.

    `values`: a critic's before the batch; `returns`: their targets. None without a critic. `teacher`: its logprobs.
    """

    advantages: list[Float32Array]
    values: list[Float32Array] | None = None
    returns: list[Float32Array] | None = None
    teacher: list[Float32Array] | None = None


Credits = Mapping[str, Credit]
"""By stream entry. A trajectory without one serves only as a baseline, and is not trained."""


@dataclass(frozen=True)
class TokenCredits:
    """As `Credit` has them, float32 `[N]`: of the sampled tokens of a batch alone."""

    advantages: Float32Array
    values: Float32Array | None = None
    returns: Float32Array | None = None
    teacher: Float32Array | None = None

    def map(self, change: Callable[[Float32Array], _Changed]) -> dict[str, _Changed]:
        """Each of them that there is, changed, by its name."""
        return {name: change(column) for name, column in vars(self).items() if column is not None}


@dataclass(frozen=True, eq=False)
class BatchCredits(Mapping[str, Credit]):
    """Credits of a whole batch. `trained`: bool `[T]`, whose there are."""

    batch: Batch
    trained: BoolArray
    by_token: TokenCredits

    @staticmethod
    def gathered(batch: Batch, credits: Credits) -> BatchCredits:
        """Those that were given one by one."""
        segments = batch.segments
        places, begins = segments.places, segments.begins
        whole: dict[str, Float32Array] = {}
        found = [credits.get(entry) for entry in batch.entries]
        numbers = [0] * len(found)
        for segment, of in enumerate(batch.owner.tolist()):
            number, credit, begin = numbers[of], found[of], int(begins[segment])
            numbers[of] += 1
            for name, pieces in vars(credit).items() if credit is not None else ():
                if pieces is not None:
                    column = whole.setdefault(name, np.zeros(len(segments.token_ids), dtype=np.float32))
                    column[begin : begin + len(pieces[number])] = pieces[number]
        columns = {name: column[places] for name, column in whole.items()}
        by_token = TokenCredits(**{"advantages": np.zeros(len(places), dtype=np.float32), **columns})
        return BatchCredits(batch, np.array([credit is not None for credit in found], dtype=np.bool_), by_token)

    def part(self, groups: Sequence[Group[Trajectory]]) -> BatchCredits:
        """Those of some neighbouring groups of the batch. Raises ValueError for groups that are not."""
        every, wanted = ([group.group for group in of] for of in (self.batch.groups, groups))
        if every == wanted:
            return self
        first = every.index(wanted[0])
        if every[first : first + len(wanted)] != wanted:
            raise ValueError("the groups are no neighbours in the batch that these advantages are of")
        batch = Batch.of(groups)
        begin = sum(len(group.members) for group in self.batch.groups[:first])
        before = int(self.batch.lengths[:begin].sum())
        own = slice(before, before + int(batch.lengths.sum()))
        trained = self.trained[begin : begin + len(batch.entries)]
        return BatchCredits(batch, trained, TokenCredits(**self.by_token.map(lambda column: column[own])))

    def __getitem__(self, entry: str) -> Credit:
        index = self.batch.entries.index(entry) if entry in self.batch.entries else -1
        if index < 0 or not self.trained[index]:
            raise KeyError(entry)
        return Credit(**self.by_token.map(lambda column: self._pieces(index, column)))

    def __iter__(self) -> Iterator[str]:
        return (entry for entry, trained in zip(self.batch.entries, self.trained, strict=True) if trained)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.trained))

    def _pieces(self, index: int, sampled: Float32Array) -> list[Float32Array]:
        segments = self.batch.segments
        whole = segments.spread(sampled)
        return [
            whole[begin : begin + length]
            for begin, length, of in zip(segments.begins, segments.lengths, self.batch.owner, strict=True)
            if of == index
        ]


Taught = Callable[[Batch], Float64Array]
"""A teacher's logprob of each sampled token of a batch: `[N]`. It may have been asked before."""


class AdvantageComputer:
    """Computes the advantages of batches. `reference`: logprobs of the run's first policy; `critic`: its values; `teacher`:
    its logprobs, which are told of too where they are given.

    Raises UsageError for a setting without effect, and for one of these that is needed and missing.
    """

    def __init__(
        self,
        settings: AdvantageSettings,
        seed: int = 0,
        *,
        reference: Measure | None = None,
        critic: Measure | None = None,
        teacher: Taught | None = None,
    ) -> None:
        self.formula = describe_advantage(settings)
        self.price = CostPrice(settings.cost) if settings.cost.component is not None else None
        self.shaper = RewardShaper(settings.reward, leaves_out_first=settings.greedy_baseline)
        self._settings, self._seed = settings, seed
        self._estimate = make_estimator(settings)
        entry = find_estimator(settings.estimator)
        self._columns = entry.columns
        what = "trainer.advantage.kl" if settings.kl else f"trainer.advantage.estimator={settings.estimator}"
        self._reference = _needed(
            reference,
            settings.kl > 0.0 or "reference" in entry.columns,
            f"{what} needs the policy that the run began with",
        )
        needs_critic = entry.critic
        self._critic = _needed(critic, needs_critic, f"trainer.advantage.estimator={settings.estimator} needs a critic")
        if teacher is None and (settings.distil is not None or "teacher" in entry.columns):
            raise UsageError(f"trainer.advantage.estimator={settings.estimator} needs a teacher", _PASS)
        self._teacher = teacher

    @property
    def independent(self) -> bool:
        """Whether advantages depend on the batch alone (a fixed teacher's logprobs are of it): on no model that this
        process computes with, and on no price or moments of rewards that batches before it have moved."""
        alone = self.price is None and not self.shaper.remembers
        return alone and self._reference is None and self._critic is None

    def of(
        self, groups: Sequence[Group[Trajectory]], version: int | None = None
    ) -> tuple[BatchCredits, CreditStatistics]:
        """Credits of the trajectories to train on, and statistics. `groups`: one batch; `version`: the policy's before it.

        Raises ValueError without a version where the estimator reads staleness, or for tokens of a later one.
        """
        batch, settings = Batch.of(groups), self._settings
        behaviour = batch.segments.logprobs[batch.segments.places].astype(np.float64)
        reference = None if self._reference is None else self._reference(batch.trajectories)
        kl = None
        if settings.kl and reference is not None:
            kl = divergences(behaviour, reference, settings.kl_estimator)
        values = None if self._critic is None else self._critic(batch.trajectories)
        penalty = None if kl is None else settings.kl * kl
        teacher = None if self._teacher is None else self._teacher(batch)
        known = {"behaviour": behaviour, "reference": reference, "values": values, "teacher": teacher}
        columns = {name: _column(name, batch, known.get(name), version) for name in self._columns}
        reward_batch = score(batch, settings, self._seed, self.price, penalty, values, columns, self.shaper)
        found = self._estimate(reward_batch, settings)
        advantages = found.advantages
        if teacher is not None and settings.distil is not None and settings.estimator != DISTILLATION:
            advantages = advantages + teacher_term(behaviour, teacher, batch.lengths, settings)
        by_token = TokenCredits(
            advantages.astype(np.float32),
            None if values is None else values.astype(np.float32),
            None if found.returns is None else found.returns.astype(np.float32),
            None if teacher is None else teacher.astype(np.float32),
        )
        credits = BatchCredits(batch, reward_batch.trained, by_token)
        costs = self._costs(batch.trajectories)
        return credits, CreditStatistics(
            kl_in_reward=float(kl.mean()) if kl is not None and len(kl) else None,
            cost_mean=float(np.mean(costs)) if costs else None,
            cost_price=None if self.price is None else self.price.value,
            left_out=len(batch.entries) - len(credits),
        )

    def learn(self, groups: Sequence[Group[Trajectory]]) -> None:
        """Update the cost's multiplier and the moments of rewards after a batch."""
        trajectories = [member.payload for group in groups for member in group.members]
        self.shaper.learn(trajectories)
        if self.price is not None:
            self.price.learn(self._costs(trajectories))

    def _costs(self, trajectories: Sequence[Trajectory]) -> list[float]:
        if self.price is None:
            return []
        sampled = (one for one in trajectories if not (self._settings.greedy_baseline and one.member == 0))
        return [self.price.cost_of(one) for one in sampled]


def _column(name: AdvantageColumn, batch: Batch, known: Float64Array | None, version: int | None) -> Column:
    """`[N]`: a column of the batch's sampled tokens. `known`: one that was computed already."""
    if known is not None:
        return known
    segments, owner = batch.segments, np.repeat(np.arange(len(batch.trajectories)), batch.lengths)
    if name == "group":
        return batch.group[owner]
    if name != "staleness" or version is None:
        raise ValueError(f"the batch's advantages were asked for without {name}, which the estimator reads")
    ages = version - np.repeat(segments.span_version, segments.span_length)
    if len(ages) and int(ages.min()) < 0:
        raise ValueError(f"a batch for version {version} has tokens of a later one")
    return ages


def _needed(measure: Measure | None, needed: bool, what: str) -> Measure | None:
    if needed and measure is None:
        raise UsageError(what, _PASS)
    return measure if needed else None


def divergences(behaviour: Float64Array, reference: Float64Array, estimator: Estimator) -> Float64Array:
    """KL penalty in the reward (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022, arXiv:2203.02155, equation 2).

        r_t = reward_t − β · D_t          D_t: k1, k2 or k3 (`trainer.algorithms.divergence`) at a sampled token

    D `[N]` of logprobs `[N]`: `behaviour` is the engine's, so only the reference needs a forward pass. 0 where both
    logprobs are −∞.
    """
    found = divergence(torch.from_numpy(behaviour), torch.from_numpy(reference), estimator)
    known: Float64Array = np.nan_to_num(found.numpy(), nan=0.0)
    return known
