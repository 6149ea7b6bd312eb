"""What the guard judges: the ratio of each figure over pairs of runs, less what the machine's speed did to all of a pair.

A machine's speed wanders by a tenth from one run to the next, for all processes of a run alike. So each CPU figure's ratio
of a pair is divided by the median ratio of that pair's services.

    pair     trainer  server  gateway  bus  runner   median      server less that
     1        1.08     1.25    1.09    1.07   1.10    1.09          1.15
     2        0.93     1.07    0.92    0.94   0.93    0.93          1.15

A commit that makes most services dearer, or cheaper, moves that median in every pair, not now and then: where it lies
beside 1 by more than chance explains, it is the commit's, and the ratios get it back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.guard.calls import CALL, STREAMED
from benchmarks.harness.against import Ratio, compared, ratio_of

ALLOWED = 1.10
STEP, START = "cpu_ms_per_step.", "start_cpu_s."
_OF_A_STEP = ("http_cpu_ms_per_trajectory", "stream_ms_per_trajectory", "trainer_cpu_us_per_token")
NOT_JUDGED = ("step_ms",)
_CHANCE = 3.0
"""Standard errors of the mean: with two, one comparison in twenty took the machine for the commit."""


def ratios_of(here: Sequence[dict[str, float]], there: Sequence[dict[str, float]]) -> dict[str, Ratio]:
    """Of the figures that all runs report. `here[i]` and `there[i]`: of one pair."""
    found = compared(here, there)
    for prefix, more in ((STEP, _OF_A_STEP), (START, ()), (CALL, ()), (STREAMED, ())):
        services = [name for name in found if name.startswith(prefix)]
        if not services:
            continue
        common = [
            statistics.median(_ratio(ours[name], theirs[name]) for name in services)
            for ours, theirs in zip(here, there, strict=True)
        ]
        level, error = statistics.fmean(common), statistics.stdev(common) / math.sqrt(len(common))
        if abs(level - 1.0) <= _CHANCE * error:
            level, error = 1.0, 0.0
        for name in [*services, *(name for name in more if name in found)]:
            own = ratio_of(
                [ours[name] * level for ours in here],
                [theirs[name] * each for theirs, each in zip(there, common, strict=True)],
            )
            found[name] = msgspec.structs.replace(found[name], ratio=own.ratio, error=math.hypot(own.error, error))
    return found


def worse_of(figures: Mapping[str, Ratio]) -> list[str]:
    """Those that are worse by more than is allowed and by more than chance explains."""
    return [
        name for name, figure in figures.items() if name not in NOT_JUDGED and figure.ratio - figure.error > ALLOWED
    ]


def _ratio(here: float, there: float) -> float:
    return ratio_of([here], [there]).ratio
