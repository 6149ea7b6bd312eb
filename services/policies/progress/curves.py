"""Curves of several runs, made comparable: runs that differ in the seed alone become one curve with a band.

runs ──same settings but seed and places──► arms ──every run read off at the same places──► mean and band
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol, TypeVar

from services.policies.progress.confidence import FEWEST, mean_interval

Axis = Literal["step", "tokens", "time"]
BandKind = Literal["none", "extremes", "mean"]
"""What a band is: of one run there is none, of two it goes from one to the other, of more it is where their mean lies."""
OWN = frozenset({"run_dir", "redis_url", "seed", "dashboard.enabled", "dashboard.port"})
"""Settings that differ between runs of one arm."""
PLACES = 60
"""At which curves are read off."""
SMOOTHED = 5
"""Steps whose mean a run's curve shows: single batches scatter."""
T = TypeVar("T")


class StepLine(Protocol):
    """What of a line of metrics.jsonl curves are drawn over; their figures are asked for by name."""

    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def time(self) -> float: ...


@dataclass(frozen=True)
class Curve:
    """`ys[i]` at `xs[i]`; `xs` rise."""

    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True)
class Band:
    """Of one arm: at each of `xs` the mean of its runs, and between which values its band lies there (`kind`)."""

    xs: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    kind: BandKind = "none"


def differences(settings: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Name → the value in each run, for what is not equal in all of them; places of files are left out."""
    names = sorted({name for each in settings for name in each} - (OWN - {"seed"}))
    values = {name: [each.get(name) for each in settings] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def arms(runs: Sequence[T], settings: Sequence[Mapping[str, object]]) -> list[list[T]]:
    """Runs of equal settings, but for `OWN`, together; in the order of their first."""
    together: dict[str, list[T]] = {}
    for run, each in zip(runs, settings, strict=True):
        key = repr(sorted((name, repr(value)) for name, value in each.items() if name not in OWN))
        together.setdefault(key, []).append(run)
    return list(together.values())


def curve_of(lines: Sequence[StepLine], figure: str, axis: Axis) -> Curve:
    """A figure of metrics.jsonl over steps, trained tokens, or seconds since the run's first step; smoothed.

    Raises AttributeError for a figure that no line has. Steps that do not know it (None) are left out.
    """
    xs, ys, tokens = [], [], 0
    for line in lines:
        tokens += line.tokens
        value = getattr(line, figure)
        if value is None:
            continue
        ys.append(float(value))
        xs.append(float({"step": line.step, "tokens": tokens, "time": line.time - lines[0].time}[axis]))
    return Curve(xs, [_mean(ys[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(ys))])


def _mean(ys: Sequence[float]) -> float:
    """A few numbers of one size: nothing is lost by adding them up, and it takes a third of `fmean`'s time."""
    return sum(ys) / len(ys)


def banded(curves: Sequence[Curve]) -> Band:
    """All curves over the stretch that each of them has. Empty ones are left out; none at all give an empty band."""
    curves = [curve for curve in curves if curve.xs]
    if not curves:
        return Band([], [], [], [])
    first, last = max(curve.xs[0] for curve in curves), min(curve.xs[-1] for curve in curves)
    if last < first:
        # They share no stretch: the longest one stands for all.
        return banded([max(curves, key=lambda curve: curve.xs[-1] - curve.xs[0])])
    xs = [first + (last - first) * i / (PLACES - 1) for i in range(PLACES)] if last > first else [first]
    read = [[_read_off(curve, x) for curve in curves] for x in xs]
    kind: BandKind = "none" if len(curves) == 1 else "extremes" if len(curves) < FEWEST else "mean"
    edges = [mean_interval(ys) if kind == "mean" else (min(ys), max(ys)) for ys in read]
    return Band(xs, [fmean(ys) for ys in read], [low for low, _ in edges], [high for _, high in edges], kind)


def _read_off(curve: Curve, x: float) -> float:
    """Between two points on the line that joins them."""
    at = bisect_left(curve.xs, x)
    if at == 0:
        return curve.ys[0]
    if at == len(curve.xs):
        return curve.ys[-1]
    x0, x1, y0, y1 = curve.xs[at - 1], curve.xs[at], curve.ys[at - 1], curve.ys[at]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
