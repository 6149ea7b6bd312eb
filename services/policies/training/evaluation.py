"""Evaluations: what answers to held-out problems say of a policy. Pure.

    solved[problem] of n samples ──► success = pass@1 with its interval, pass@k

Sources: pass@k without bias, Chen et al. 2021 (arXiv:2107.03374), equation 1. The interval is Wilson's (1927) over an
effective number of answers, as Korn and Graubard (1998) have it for clustered samples: answers to one problem are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean

import msgspec

from services.wire.rollout_api import Evaluation, EvaluationAnswers, TaskEvaluation
from services.wire.run_metrics import EvaluationPoint

LEVEL = 0.95
"""Of every interval."""


@dataclass(frozen=True)
class Interval:
    """Where the success over all problems lies, at `LEVEL`."""

    low: float
    high: float


def success_of(solved: Sequence[int], samples: int) -> float:
    """The share of answers that were right: pass@1. `solved`: right answers to each problem, of `samples`."""
    return fmean(solved) / samples


def pass_at(solved: Sequence[int], samples: int, k: int) -> float:
    """The share of problems that k answers solve at least once.

    Raises ValueError for a k above `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} cannot be told from {samples} answers a problem")
    every = comb(samples, k)
    return fmean(1.0 - comb(samples - right, k) / every for right in solved)


def ks_of(samples: int) -> list[int]:
    """The k that are reported: powers of two, and `samples` itself."""
    ks = [1]
    while ks[-1] * 2 <= samples:
        ks.append(ks[-1] * 2)
    return ks if ks[-1] == samples else [*ks, samples]


def interval(solved: Sequence[int], samples: int, different: int | None = None) -> Interval:
    """Of the success, problems being drawn anew as well as answers. `different`: problems, those that ask the same counted
    once: more of them tell no more.

    With one answer a problem this is Wilson's interval. With more, the answers count for as many as would spread the mean
    as far as the problems' own means do.
    """
    problems = len(solved)
    shares = [right / samples for right in solved]
    success, answers = fmean(shares), problems * samples
    spread = success * (1.0 - success)
    effective = float(answers)
    if problems > 1 and samples > 1 and spread > 0.0:
        variance = sum((share - success) ** 2 for share in shares) / (problems - 1) / problems
        effective = min(effective, max(float(problems), spread / variance)) if variance > 0.0 else effective
    if different is not None:
        effective *= min(1.0, different / problems)
    return _wilson(success, effective)


def _wilson(success: float, count: float) -> Interval:
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2.0)
    if success in (0.0, 1.0):
        # The same formula, without the rounding that would leave the success out.
        bound = count / (count + z * z)
        return Interval(bound, 1.0) if success else Interval(0.0, 1.0 - bound)
    centre = success + z * z / (2.0 * count)
    half = z * sqrt(success * (1.0 - success) / count + z * z / (4.0 * count * count))
    whole = 1.0 + z * z / count
    return Interval(max(0.0, (centre - half) / whole), min(1.0, (centre + half) / whole))


def best_of(successes: Sequence[tuple[int, float]]) -> int | None:
    """The version with the highest success; the older of two that are equal. None of none."""
    return max(successes, key=lambda found: (found[1], -found[0]))[0] if successes else None


def evaluation_of(told: EvaluationAnswers) -> Evaluation:
    """What the answers say."""
    return Evaluation(
        **told.model_dump(exclude={"solved", "tasks", "mean_length"}),
        **_found(told.solved, told.samples, told.mean_length, told.different).model_dump(),
        tasks={each.task: _found(each.solved, told.samples, each.mean_length) for each in told.tasks},
    )


def _found(solved: Sequence[int], samples: int, mean_length: float, different: int | None = None) -> TaskEvaluation:
    within = interval(solved, samples, different)
    return TaskEvaluation(
        problems=len(solved),
        success=success_of(solved, samples),
        low=within.low,
        high=within.high,
        pass_at={k: pass_at(solved, samples, k) for k in ks_of(samples)},
        mean_length=mean_length,
    )


def point_of(evaluation: Evaluation) -> EvaluationPoint:
    """What status and summary show of it."""
    return msgspec.convert(evaluation, EvaluationPoint, from_attributes=True)
