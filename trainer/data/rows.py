"""Training rows of a batch: the segments that give a gradient, with the tokens over K left out of the loss.

Group[Trajectory] ──advantage──► segments ──staleness──► Row, or only counted where its loss is exactly 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from services.config.training.algorithm import AdvantageSettings
from services.policies.batching import Group
from services.wire.packed import Float32Array, Int32Array, unpack_experts, unpack_kept
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import BoolArray, Int64Array
from trainer.algorithms.advantages.compute import AdvantageComputer, BatchCredits, Credits
from trainer.algorithms.advantages.flat import FlatSegments, ranges
from trainer.algorithms.advantages.rewards import RIGHT, Batch, success_of
from trainer.data.staleness import NOT_SAMPLED, Ages, Int16Array, StalenessTally, judge_segments


@dataclass(frozen=True, eq=False)
class KeptColumn:
    """What sampled tokens were sampled from, where `top_k`, `top_p` or `min_p` cut: `counts` int32 `[n]`, how many tokens
    were left, 0 where all were, or nothing was sampled; `ids` int32 `[Σ counts]`, which."""

    counts: Int32Array
    ids: Int32Array

    def take(self, tokens: Int64Array) -> KeptColumn:
        """Of these tokens, in this order."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        counts = self.counts[tokens]
        return KeptColumn(counts, self.ids[ranges(ends[tokens] - counts, counts.astype(np.int64))])

    @staticmethod
    def joined(columns: Sequence[KeptColumn | None], lengths: Sequence[int]) -> KeptColumn | None:
        """Columns of so many tokens, one after the other; None where none cuts."""
        there = [column for column in columns if column is not None]
        if not there:
            return None
        counts = [
            np.zeros(length, dtype=np.int32) if column is None else column.counts
            for column, length in zip(columns, lengths, strict=True)
        ]
        return KeptColumn(np.concatenate(counts), np.concatenate([column.ids for column in there]))


@dataclass(frozen=True)
class Row:
    """A segment of `n` tokens that gives a gradient: ids int32 `[n]`, behaviour logprobs float32 `[n]`, ages.

    `advantages`: float32 `[n]`, 0 where the policy did not generate the token. `temperatures`: float32 `[n]`, with
    which each sampled token was sampled, 1 elsewhere; None when all are 1. `values`, `returns`: float32 `[n]`, a
    critic's before the batch and what they should have been; None without a critic. `teacher`: float32 `[n]`, its logprobs;
    None without one. `group`: its number among the groups of the step. `right`: it is of a right answer. `kept`: what it
    was sampled from; None where nothing was cut. `experts`: int16 `[n, layers · top]`, what a mixture's layers chose, −1
    where it is not known; None where nobody says. `segment`: its number among the segments that the rows were made of; −1
    where nobody says.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    ages: Ages
    advantages: Float32Array
    temperatures: Float32Array | None
    values: Float32Array | None = None
    returns: Float32Array | None = None
    teacher: Float32Array | None = None
    group: int = 0
    right: bool = False
    kept: KeptColumn | None = None
    experts: Int16Array | None = None
    segment: int = -1


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Row]):
    """Rows of `lengths` `[R]` tokens, end to end: the columns of `Row`, `[T]` each; `current_until` and `group` `[R]`.

    `right`: `[R]`; None where nobody says what a right answer is. `kept_counts`, `kept_ids`: of a `KeptColumn`; None where
    nothing was cut. `experts`: int16 `[T, layers · top]`, as `Row` has them. `segment`: `[R]`; None where nobody says.
    """

    lengths: Int64Array
    token_ids: Int32Array
    logprobs: Float32Array
    ages: Int16Array
    current_until: Int64Array
    group: Int64Array
    advantages: Float32Array
    temperatures: Float32Array | None
    values: Float32Array | None = None
    returns: Float32Array | None = None
    teacher: Float32Array | None = None
    right: BoolArray | None = None
    kept_counts: Int32Array | None = None
    kept_ids: Int32Array | None = None
    experts: Int16Array | None = None
    segment: Int64Array | None = None

    @property
    def contents(self) -> Int32Array:
        """`[T]`: equal numbers where tokens are computed alike, if what stands before them is: the ids, or, with experts, a
        number for each pair of an id and its experts that there is."""
        if self.experts is None:
            return self.token_ids
        both = np.concatenate([self.token_ids[:, None], self.experts.astype(np.int32)], axis=1)
        return np.unique(both, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)

    @property
    def kept(self) -> KeptColumn | None:
        if self.kept_counts is None or self.kept_ids is None:
            return None
        return KeptColumn(self.kept_counts, self.kept_ids)

    @staticmethod
    def joined(rows: Sequence[Row]) -> Rows:
        """Rows that were made one by one. Raises ValueError where some have a column that others have not."""
        if isinstance(rows, Rows):
            return rows
        warm = any(row.temperatures is not None for row in rows)
        kept = KeptColumn.joined([row.kept for row in rows], [len(row.token_ids) for row in rows])
        lengths = [len(row.token_ids) for row in rows]
        return Rows(
            np.array(lengths, dtype=np.int64),
            np.concatenate([row.token_ids for row in rows]),
            np.concatenate([row.logprobs for row in rows]),
            np.concatenate([row.ages.values for row in rows]),
            np.array([row.ages.current_until for row in rows], dtype=np.int64),
            np.array([row.group for row in rows], dtype=np.int64),
            np.concatenate([row.advantages for row in rows]),
            np.concatenate([_temperatures_of(row) for row in rows]) if warm else None,
            _joined([row.values for row in rows]),
            _joined([row.returns for row in rows]),
            _joined([row.teacher for row in rows]),
            np.array([row.right for row in rows], dtype=np.bool_),
            None if kept is None else kept.counts,
            None if kept is None else kept.ids,
            _joined_experts([row.experts for row in rows], lengths),
            np.array([row.segment for row in rows], dtype=np.int64),
        )

    @property
    def begins(self) -> Int64Array:
        """`[R]`: where each begins."""
        begins: Int64Array = np.cumsum(self.lengths) - self.lengths
        return begins

    def take(self, chosen: Int64Array) -> Rows:
        """These, in this order."""
        tokens = ranges(self.begins[chosen], self.lengths[chosen])
        kept = None if self.kept is None else self.kept.take(tokens)

        def of(column: Float32Array | None) -> Float32Array | None:
            return None if column is None else column[tokens]

        return Rows(
            self.lengths[chosen],
            self.token_ids[tokens],
            self.logprobs[tokens],
            self.ages[tokens],
            self.current_until[chosen],
            self.group[chosen],
            self.advantages[tokens],
            of(self.temperatures),
            of(self.values),
            of(self.returns),
            of(self.teacher),
            None if self.right is None else self.right[chosen],
            None if kept is None else kept.counts,
            None if kept is None else kept.ids,
            None if self.experts is None else self.experts[tokens],
            None if self.segment is None else self.segment[chosen],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        end = int(np.cumsum(self.lengths)[index])
        own = slice(end - int(self.lengths[index]), end)
        temperatures, values, returns, teacher = (
            None if column is None else column[own]
            for column in (self.temperatures, self.values, self.returns, self.teacher)
        )
        ages, group = Ages(self.ages[own], int(self.current_until[index])), int(self.group[index])
        right = self.right is not None and bool(self.right[index])
        kept = None if self.kept is None else self.kept.take(np.arange(own.start, own.stop))
        experts = None if self.experts is None else self.experts[own]
        tokens, logprobs, advantages = self.token_ids[own], self.logprobs[own], self.advantages[own]
        segment = -1 if self.segment is None else int(self.segment[index])
        columns = values, returns, teacher, group, right, kept, experts, segment
        return Row(tokens, logprobs, ages, advantages, temperatures, *columns)


def rows_of(
    groups: Sequence[Group[Trajectory]],
    policy_version: int,
    k: int,
    credits: Credits | None = None,
    *,
    skip_idle: bool = True,
) -> tuple[Rows, StalenessTally]:
    """The segments that give a gradient, judged for a step from `policy_version` under K; all that are trained are counted.

    `credits`: of the batch that the groups are of, None for GRPO's; a trajectory without any is left out. With `skip_idle`,
    segments whose advantages are all 0 skip both passes: right where the loss is exactly 0 there. Where nothing is fresh it
    always is.
    """
    credits = AdvantageComputer(AdvantageSettings()).of(groups)[0] if credits is None else credits
    if isinstance(credits, BatchCredits):
        credits = credits.part(groups)
    else:
        credits = BatchCredits.gathered(Batch.of(groups), credits)
    batch, segments = credits.batch, credits.batch.segments
    by_token, tally, counted = credits.by_token, StalenessTally(), credits.trained[batch.owner]
    ages = judge_segments(segments, policy_version, k, tally, counted, batch.owner)
    trains = ages.trains & counted
    if skip_idle:
        signal = np.repeat(segments.span_segment, segments.span_length)[by_token.advantages != 0.0]
        trains &= np.bincount(signal, minlength=len(segments.lengths)) > 0
    kept = _kept(segments, batch.trajectories)
    rows = Rows(
        segments.lengths,
        segments.token_ids,
        segments.logprobs,
        ages.values,
        ages.current_until,
        batch.group[batch.owner],
        segments.spread(by_token.advantages),
        _temperatures(segments, batch.trajectories, batch.owner),
        None if by_token.values is None else segments.spread(by_token.values),
        None if by_token.returns is None else segments.spread(by_token.returns),
        None if by_token.teacher is None else segments.spread(by_token.teacher),
        np.array([success_of(one) >= RIGHT for one in batch.trajectories], dtype=np.bool_)[batch.owner],
        kept_counts=None if kept is None else kept.counts,
        kept_ids=None if kept is None else kept.ids,
        experts=_experts(batch.trajectories, segments.lengths),
        segment=np.arange(len(segments.lengths)),
    )
    return (rows if trains.all() else rows.take(np.flatnonzero(trains))), tally


def to_measure(trajectories: Sequence[Trajectory]) -> Rows:
    """Every segment that has a sampled token, in their order, with each of those tokens as a fresh one."""
    segments = FlatSegments.of([segment for one in trajectories for segment in one.segments])
    owner = np.repeat(np.arange(len(trajectories)), [len(one.segments) for one in trajectories])
    ages = np.full(len(segments.token_ids), NOT_SAMPLED, dtype=np.int16)
    ages[segments.places] = 0
    kept = _kept(segments, trajectories)
    rows = Rows(
        segments.lengths,
        segments.token_ids,
        segments.logprobs,
        ages,
        segments.lengths,
        np.zeros_like(segments.lengths),
        np.zeros(len(ages), dtype=np.float32),
        _temperatures(segments, trajectories, owner),
        kept_counts=None if kept is None else kept.counts,
        kept_ids=None if kept is None else kept.ids,
        experts=_experts(trajectories, segments.lengths),
    )
    return rows.take(np.flatnonzero(segments.sampled_tokens()))


def _temperatures(segments: FlatSegments, trajectories: Sequence[Trajectory], owner: Int64Array) -> Float32Array | None:
    """`[T]`: the temperature of each sampled token, 1 elsewhere; None where all are 1. `owner`: each segment's trajectory.

    A session's calls may differ in it: the trainer divides each token's logits by its own. Greedy tokens' logprobs are of
    temperature 1 (`services.wire.sampling`).
    """
    if all(sampling.temperature in (0.0, 1.0) for one in trajectories for sampling in one.samplings):
        return None
    of_spans = zip(owner[segments.span_segment].tolist(), segments.span_sampling.tolist(), strict=True)
    by_span = [trajectories[of].samplings[sampling].temperature or 1.0 for of, sampling in of_spans]
    return segments.spread(np.repeat(np.array(by_span, dtype=np.float32), segments.span_length), 1.0)


def _kept(segments: FlatSegments, trajectories: Sequence[Trajectory]) -> KeptColumn | None:
    """Of all tokens of the segments; None where nothing was cut."""
    choices = [segment.choices for one in trajectories for segment in one.segments]
    told = [one for one in choices if one is not None and one.kept_counts]
    if not told:
        return None
    sampled = segments.sampled_tokens().tolist()
    of_sampled = [
        unpack_kept(one.kept_counts) if one is not None and one.kept_counts else np.zeros(count, dtype=np.uint32)
        for one, count in zip(choices, sampled, strict=True)
    ]
    counts = np.zeros(len(segments.token_ids), dtype=np.int32)
    counts[segments.places] = np.concatenate(of_sampled)
    return KeptColumn(counts, unpack_kept(b"".join([one.kept_ids for one in told])).astype(np.int32))


def _experts(trajectories: Sequence[Trajectory], lengths: Int64Array) -> Int16Array | None:
    """int16 `[T, layers · top]` of all segments; None where nobody says, −1 where one does not."""
    segments = [segment.choices for one in trajectories for segment in one.segments]
    choices = [None if one is None else one.experts for one in segments]
    return _joined_experts(
        [None if one is None else unpack_experts(one.packed, one.layers, one.top, one.itemsize) for one in choices],
        lengths.tolist(),
    )


def _joined_experts(columns: Sequence[Int16Array | None], lengths: Sequence[int]) -> Int16Array | None:
    known = [column for column in columns if column is not None]
    if not known:
        return None
    width = known[0].shape[1]
    return np.concatenate(
        [
            np.full((length, width), -1, dtype=np.int16) if column is None else column
            for column, length in zip(columns, lengths, strict=True)
        ]
    )


def _temperatures_of(row: Row) -> Float32Array:
    return np.ones(len(row.token_ids), dtype=np.float32) if row.temperatures is None else row.temperatures


def _joined(columns: Sequence[Float32Array | None]) -> Float32Array | None:
    known = [column for column in columns if column is not None]
    if known and len(known) < len(columns):
        raise ValueError("some rows have a critic's values, or a teacher's logprobs, and some have not")
    return np.concatenate(known) if known else None
