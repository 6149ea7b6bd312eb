"""Length distributions: buckets that hold every length once, exact means, and a distance that sees what is left out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.length_stats import Lengths, bucket_of, distance

lengths = st.lists(st.integers(0, 100_000), max_size=60)


@given(st.integers(0, 1 << 40))
def test_a_bucket_is_a_quarter_of_an_octave_at_most(length: int) -> None:
    bucket = bucket_of(length)
    assert bucket <= length <= bucket + bucket // 4
    assert bucket_of(bucket) == bucket
    assert bucket_of(length + 1) in (bucket, length + 1)


def test_there_is_no_negative_length() -> None:
    with pytest.raises(ValueError, match="-1"):
        bucket_of(-1)


@given(lengths, lengths)
def test_sums_and_means_are_exact(one: list[int], other: list[int]) -> None:
    both = Lengths.of(Counter(one)) + Lengths.of(Counter(other))
    assert both == Lengths.of(Counter(one + other))
    sampled = one + other
    assert both.count == len(sampled)
    assert both.mean == (sum(sampled) / len(sampled) if sampled else None)


@given(lengths, lengths)
def test_the_distance_is_that_of_the_empirical_distributions_of_buckets(one: list[int], other: list[int]) -> None:
    measured = distance(Lengths.of(Counter(one)), Lengths.of(Counter(other)))
    if not one or not other:
        assert measured is None
        return
    buckets = [[bucket_of(length) for length in sampled] for sampled in (one, other)]
    shares = [
        [sum(each <= edge for each in sampled) / len(sampled) for edge in sorted({*buckets[0], *buckets[1]})]
        for sampled in buckets
    ]
    assert measured == pytest.approx(max(abs(a - b) for a, b in zip(*shares, strict=True)))


def test_long_answers_that_are_left_out_are_seen() -> None:
    generated = Lengths.of({10: 75, 1000: 25})
    assert distance(generated, Lengths.of({10: 60, 1000: 20})) == pytest.approx(0.0)
    assert distance(generated, Lengths.of({10: 75})) == pytest.approx(0.25)
