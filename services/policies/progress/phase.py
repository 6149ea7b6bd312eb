"""Phase of a run and how much of it is done. Pure.

    starting ──► evaluation before training ──► training ──► evaluation after training ──► ended
    warm start, servers and services,             steps       answers to held-out problems
    each counts alike

The way to the first step is one percentage: a run that only starts shows that it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

PhaseName = Literal["starting", "evaluation before training", "training", "evaluation after training"]


@dataclass(frozen=True)
class Part:
    """A part of a phase: `done` of `total` of what it counts, a broken number where it has begun one. `now`: what it does
    at the moment, in words."""

    name: str
    done: float
    total: int
    now: str = ""

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    @property
    def ended(self) -> bool:
        return self.done >= self.total > 0


@dataclass(frozen=True)
class Phase:
    """`share`: of the way to the first step while there is none; of the phase afterwards. 0 to 1."""

    name: PhaseName
    share: float
    parts: tuple[Part, ...] = ()

    @property
    def of_start(self) -> bool:
        """Whether `share` is of the way to the first step, with parts that say what is on it."""
        return self.name in ("starting", "evaluation before training")


def phase_of(
    starting: Sequence[Part],
    *,
    step: int,
    steps: int,
    evaluated_before: bool,
    answers: Part | None = None,
    trainer_waits: bool = False,
) -> Phase:
    """`starting`: what a run consists of when it starts. `answers`: of the held-out problems of the evaluation that is
    made, None where none is known. `trainer_waits`: for a batch, or for anything else."""
    if step >= steps > 0 and not trainer_waits:
        after = _of("evaluation after training", answers)
        return Phase("evaluation after training", after.share, (after,))
    if step:
        return Phase("training", min(1.0, step / steps) if steps > 0 else 0.0)
    begun = all(part.ended for part in starting)
    before = _of("evaluation before training", answers)
    if evaluated_before:
        before = Part(before.name, 1, 1)
    share = sum(part.share for part in (*starting, before)) / (len(starting) + 1)
    if not begun:
        return Phase("starting", share, tuple(starting))
    return Phase("training", 0.0) if evaluated_before else Phase("evaluation before training", share, (before,))


def _of(evaluation: PhaseName, answers: Part | None) -> Part:
    """The answers where they are this evaluation's, and not those of one that has ended."""
    return answers if answers is not None and answers.name == evaluation else Part(evaluation, 0, 0)


LOOKED_BACK = 20
"""Steps that a pace is measured on: the first ones wait for things that come once."""


def left_s(took_s: Sequence[float], steps: int) -> float | None:
    """Seconds until the last of `steps`. `took_s`: what each step so far took; None with fewer than 2.

    Time in which the run stood still, until it was resumed, is no part of a step. The first step is left out: it waits for
    the first rollouts.
    """
    if len(took_s) < 2:
        return None
    return max(0.0, fmean(took_s[1:][-LOOKED_BACK:]) * (steps - len(took_s)))
