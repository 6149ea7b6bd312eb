"""Speeds of arms, round by round, and what one comes to of another. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Speeds = Mapping[str, Sequence[float]]
"""Tokens a second by arm, one figure a round; all arms have as many."""
Ratios = Mapping[str, tuple[str, str]]
"""By name: which arm is divided by which, round by round."""


def by_round(speeds: Speeds, ours: str, theirs: str) -> list[float]:
    """One arm ÷ another in each round; empty where one of them was not run."""
    return [round(a / b, 4) for a, b in zip(speeds.get(ours, ()), speeds.get(theirs, ()), strict=True)]


def medians(by_name: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The median of each; None for one without figures."""
    return {name: round(statistics.median(values), 3) if values else None for name, values in by_name.items()}


def said(speeds: Speeds, named: Ratios) -> str:
    """The last round's ratios in a line."""
    last = {name: by_round(speeds, *arms)[-1:] for name, arms in named.items()}
    return ", ".join(f"{name} {figure:.3f}" for name, figures in last.items() for figure in figures)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed (nearest rank). Raises ValueError without any."""
    if not values:
        raise ValueError("no percentile without values")
    ordered = sorted(values)
    rank = -int(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]
