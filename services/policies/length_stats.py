"""Distributions of answer lengths, small enough for a hash in Redis, and how far two of them lie apart.

    length      1 … 7   8 … 9   10 … 11   12 … 13   14 … 15   16 … 19   20 … 23   …      four buckets an octave
    bucket      itself    8        10        12        14        16        20     …      named by its least length

What is trained may differ from what was sampled: long answers expire, come too late, or are cut off with the run. The
distance is Kolmogorov and Smirnov's: the largest difference of the two cumulative shares, 0 where they are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


def bucket_of(length: int) -> int:
    """The least length of the bucket that `length` falls into; 0 for 0. Raises ValueError for a negative one."""
    if length < 0:
        raise ValueError(f"a length of {length}")
    if length == 0:
        return 0
    octave = 1 << (length.bit_length() - 1)
    return octave + (length - octave) * 4 // octave * octave // 4


@dataclass(frozen=True)
class Lengths:
    """`buckets`: how many lengths fell into each. `total`: their exact sum."""

    buckets: Mapping[int, int]
    total: int

    @staticmethod
    def of(lengths: Mapping[int, int]) -> Lengths:
        """From how often each exact length occurred."""
        buckets: dict[int, int] = {}
        for length, count in lengths.items():
            bucket = bucket_of(length)
            buckets[bucket] = buckets.get(bucket, 0) + count
        return Lengths(buckets, sum(length * count for length, count in lengths.items()))

    def __add__(self, other: Lengths) -> Lengths:
        names = self.buckets.keys() | other.buckets.keys()
        return Lengths(
            {name: self.buckets.get(name, 0) + other.buckets.get(name, 0) for name in names}, self.total + other.total
        )

    @property
    def count(self) -> int:
        return sum(self.buckets.values())

    @property
    def mean(self) -> float | None:
        """Exact; None where there are none."""
        return self.total / self.count if self.count else None

    def up_to(self, bucket: int) -> float:
        """The share of lengths that lie in `bucket` or below; 0 where there are none."""
        return sum(count for name, count in self.buckets.items() if name <= bucket) / max(1, self.count)


def distance(one: Lengths, other: Lengths) -> float | None:
    """Between 0 and 1; None where one of them is empty."""
    if not one.count or not other.count:
        return None
    return max(abs(one.up_to(name) - other.up_to(name)) for name in one.buckets.keys() | other.buckets.keys())
