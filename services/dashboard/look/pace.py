"""How often a run is looked at: as often as a hundredth of a core allows. Pure."""

from __future__ import annotations

SHARE = 0.005
"""Of a core, that looks at one run may take."""
LEAST_S, MOST_S = 1.0, 1.8
"""Between two looks. The longest is what a page may be late by when it says that a service has died."""


def pause_after(cpu_s: float) -> float:
    """Seconds until the next look, where the last one took `cpu_s` seconds of CPU time."""
    return min(MOST_S, max(LEAST_S, cpu_s / SHARE))
