"""Curves of runs beside one another: which figures, over what, and the arms that runs of other seeds make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from services.observability.run_view.run_files import RunFiles
from services.policies.progress.curves import Axis, Band, arms, banded, curve_of

FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "success": "success of the batch",
        "reward": "reward",
        "response_length": "response length, tokens",
        "entropy": "entropy, nats a token",
        "staleness_mean": "staleness, steps",
        "tokens_per_s": "tokens a second",
    }
)
"""A figure of metrics.jsonl → what it is."""
AXES: Mapping[Axis, str] = MappingProxyType(
    {"step": "optimizer step", "tokens": "trained tokens", "time": "seconds since the first step"}
)


def bands_of(runs: Sequence[RunFiles], figure: str, axis: Axis) -> list[tuple[str, Band]]:
    """The arms' names and curves."""
    named = []
    for arm in arms(runs, [run.settings for run in runs]):
        more = f" and {len(arm) - 1} of other seeds" if len(arm) > 1 else ""
        named.append((f"{arm[0].name}{more}", banded([curve_of(run.lines, figure, axis) for run in arm])))
    return named
