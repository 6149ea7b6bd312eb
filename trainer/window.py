"""The staleness window applied to a batch: per-token ages, what may enter the loss, and how it is distributed.

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

NOT_SAMPLED = -1
_OLDEST = np.iinfo(np.int16).max
Int16Array = npt.NDArray[np.int16]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ages:
    """Of one segment's `n` tokens.

    `staleness`: int16 `[n]`, optimizer steps, NOT_SAMPLED where the policy drew nothing. `fresh`: bool `[n]`, in the loss.
    `current`: bool `[n]`, drawn by the very policy the step starts from, and so was every sampled token before it: only
    there do engine and trainer compute the same thing (after a commit the engine's KV cache stays that of older weights).
    """

    staleness: Int16Array
    fresh: BoolArray
    current: BoolArray


@dataclass
class StalenessTally:
    """Staleness over a batch: `histogram` counts fresh tokens by staleness, `masked` the sampled ones over K."""

    histogram: Counter[int] = field(default_factory=Counter)
    masked: int = 0

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
    def largest(self) -> int:
        """The largest staleness that entered a loss: the promise is that it never exceeds K."""
        return max(self.histogram, default=0)

    @property
    def masked_fraction(self) -> float:
        return self.masked / max(1, self.masked + self.fresh)


def judge(spans: Iterable[VersionSpan], length: int, policy_version: int, k: int, tally: StalenessTally) -> Ages:
    """Judge a segment of `length` tokens for a step from `policy_version`, and count it. Raises FutureVersionError."""
    ages = np.full(length, NOT_SAMPLED, dtype=np.int16)
    fresh = np.zeros(length, dtype=np.bool_)
    current = np.zeros(length, dtype=np.bool_)
    all_current = True
    for span in window(((s.start, s.length, s.version) for s in spans), policy_version, k):
        place = slice(span.start, span.start + span.length)
        ages[place] = min(span.staleness, _OLDEST)
        fresh[place] = span.fresh
        all_current = all_current and span.staleness == 0
        current[place] = all_current
        tally.count(span)
    return Ages(ages, fresh, current)
