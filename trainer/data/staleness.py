"""Staleness of a batch's tokens: per-token ages, which may enter the loss (K), and their distribution.

The rule itself is `services.policies.staleness`; here it only meets arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.policies.staleness import WindowedSpan, window
from services.wire.trajectory import VersionSpan
from trainer.algorithms.advantages.batch import BoolArray, Int64Array
from trainer.algorithms.advantages.flat import FlatSegments, ranges

NOT_SAMPLED = -1
OVER_K = -2
_OLDEST = np.iinfo(np.int16).max
Int16Array = npt.NDArray[np.int16]


@dataclass(frozen=True)
class Ages:
    """Of one segment's `n` tokens.

    `values`: int16 `[n]`: staleness in optimizer steps of tokens that may enter the loss, OVER_K of sampled ones that
    may not, NOT_SAMPLED of those that the policy did not generate. `current_until`: sampled tokens before this position
    were sampled by the very policy that the step starts from. Only there do engine and trainer compute the same thing:
    after a commit, the engine's KV cache stays that of older weights.
    """

    values: Int16Array
    current_until: int

    @property
    def trains(self) -> bool:
        """Whether any token may enter the loss."""
        return bool((self.values >= 0).any())


@dataclass
class StalenessTally:
    """Staleness over a batch: `histogram` counts fresh tokens by staleness, `masked` the sampled ones over K."""

    histogram: Counter[int] = field(default_factory=Counter)
    masked: int = 0
    segments: int = 0
    """Those of which a token may enter the loss."""
    while_sampled: int = 0
    """Summed over fresh tokens: steps from their version to the last one that sampled for their own trajectory."""
    since_taken: int = 0
    """Steps that were made on this batch before: a part of every token's staleness."""

    def count(self, span: WindowedSpan) -> None:
        if span.fresh:
            self.histogram[span.staleness] += span.length
        else:
            self.masked += span.length

    @property
    def fresh(self) -> int:
        return self.histogram.total()

    @property
    def mean(self) -> float:
        return sum(age * count for age, count in self.histogram.items()) / max(1, self.fresh)

    @property
    def while_generated(self) -> float:
        """What of `mean` came about while trajectories were still sampled."""
        return self.while_sampled / max(1, self.fresh)

    @property
    def while_trained(self) -> float:
        """What of `mean` came about by the steps on the batch itself."""
        return float(self.since_taken) if self.fresh else 0.0

    @property
    def while_queued(self) -> float:
        """The rest of `mean`: from a trajectory's last token until the trainer took its batch."""
        return max(0.0, self.mean - self.while_generated - self.while_trained)

    @property
    def largest(self) -> int:
        """The largest staleness that entered a loss: the promise is that it never exceeds K."""
        return max(self.histogram, default=0)

    @property
    def masked_fraction(self) -> float:
        return self.masked / max(1, self.masked + self.fresh)


def judge(spans: Iterable[VersionSpan], length: int, policy_version: int, k: int, tally: StalenessTally) -> Ages:
    """Judge a segment of `length` tokens for a step from `policy_version`, and count it. Raises FutureVersionError."""
    values = np.full(length, NOT_SAMPLED, dtype=np.int16)
    current_until = length
    for span in window(((s.start, s.length, s.version) for s in spans), policy_version, k):
        values[span.start : span.start + span.length] = min(span.staleness, _OLDEST) if span.fresh else OVER_K
        if span.staleness > 0:
            current_until = min(current_until, span.start)
        tally.count(span)
    ages = Ages(values, current_until)
    tally.segments += ages.trains
    return ages


@dataclass(frozen=True)
class SegmentAges:
    """Of all segments: `values` int16 `[T]` and `current_until` int64 `[S]`, as `Ages` has them; `trains` bool `[S]`."""

    values: Int16Array
    current_until: Int64Array
    trains: BoolArray


def judge_segments(
    segments: FlatSegments,
    policy_version: int,
    k: int,
    tally: StalenessTally,
    counted: BoolArray,
    owner: Int64Array,
) -> SegmentAges:
    """`judge` for many segments at once: each version is judged once. Only segments that are `counted`, `[S]`, are judged
    and counted; those of the others mean nothing. `owner`, `[S]`: their trajectories. Raises FutureVersionError."""
    judging = counted[segments.span_segment]
    segment, start, length = (
        column[judging] for column in (segments.span_segment, segments.span_start, segments.span_length)
    )
    versions, which = np.unique(segments.span_version[judging], return_inverse=True)
    tokens = np.bincount(which, length, len(versions)).astype(np.int64).tolist()
    judged = window(zip((0,) * len(tokens), tokens, versions.tolist(), strict=True), policy_version, k)
    for span in judged:
        tally.count(span)
    age = np.array([span.staleness for span in judged], dtype=np.int64)[which]
    fresh = np.array([span.fresh for span in judged], dtype=np.bool_)[which]
    version, of = segments.span_version[judging], owner[segment]
    last = np.zeros(int(owner.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(last, of, version)
    tally.while_sampled += int(((last[of] - version) * length)[fresh].sum())
    values = np.full(len(segments.token_ids), NOT_SAMPLED, dtype=np.int16)
    places = ranges(segments.begins[segment] + start, length)
    values[places] = np.repeat(np.where(fresh, np.minimum(age, _OLDEST), OVER_K), length)
    current_until = segments.lengths.copy()
    old = age > 0
    np.minimum.at(current_until, segment[old], start[old])
    trains = np.zeros(len(segments.lengths), dtype=np.bool_)
    trains[segment[fresh & (length > 0)]] = True
    tally.segments += int(np.count_nonzero(trains))
    return SegmentAges(values, current_until, trains)


def count_only(spans: Iterable[VersionSpan], policy_version: int, k: int, tally: StalenessTally) -> None:
    """`judge` for a segment whose advantage is 0: it is counted and goes no further. Raises FutureVersionError."""
    fresh = False
    for span in window(((s.start, s.length, s.version) for s in spans), policy_version, k):
        tally.count(span)
        fresh = fresh or (span.fresh and span.length > 0)
    tally.segments += fresh
