"""How far the mean of a few runs is known: Student's t interval at 95 %. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import atan, cos, pi, sin, sqrt
from statistics import fmean, stdev

from services.policies.training.evaluation import LEVEL

FEWEST = 3
"""Runs of which an interval says something: of two it is some thirteen times as wide as they are apart."""


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the mean of all such runs lies, at LEVEL. Raises ValueError for fewer than two values."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no interval")
    mean, half = fmean(values), t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return mean - half, mean + half


@cache
def t_quantile(freedom: int) -> float:
    """Between −t and t lies LEVEL of Student's distribution with so many degrees of freedom."""
    low, high = 0.0, 16.0
    while high - low > 1e-12:
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within(middle, freedom) < LEVEL else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The share between −t and t: for whole degrees of freedom a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = atan(t / sqrt(freedom))
    square, odd = cos(angle) ** 2, freedom % 2
    term, total = (cos(angle), 0.0) if odd else (1.0, 0.0)
    # Of cosines to the power 1, 3, 5 … or 0, 2, 4 …, up to freedom − 2.
    for power in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= square * (power + 1) / (power + 2)
    return 2.0 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
