"""Learning-rate schedules: the factor that a run's learning rate is multiplied by at each optimizer step.

    constant   ╭──────────     linear, cosine   ╭╮           wsd   ╭───────╮
               │                                │ ╲╮               │        ╲
               ╯                                ╯   ╲─ floor       ╯         ╲ floor

A linear warm-up, (s + 1)/W at step s = 0 … W − 1, then with S steps in the run and a decay that begins at step B:

    t = (s − B)/(S − B)      linear, wsd: 1 − (1 − floor)·t      cosine: floor + (1 − floor)·(1 + cos πt)/2

The floor is reached where the run ends, at s = S, so that every step of the run moves the weights. linear and cosine begin
to decay where the warm-up ends (cosine: Loshchilov & Hutter 2017, arXiv:1608.03983). wsd, warm-up, stable, decay, holds the
rate until the last share of the run (Hu et al. 2024, MiniCPM, arXiv:2404.06395; linear: Hägele et al. 2024,
arXiv:2405.18392).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`steps`: optimizer steps of the run; `decay_share`: of them, over which wsd decays; `floor`: share of the learning
    rate that is left in the end.

    Raises ValueError where the kind needs the run's number of steps and there is none, and where the warm-up leaves no
    step for the decay.
    """

    kind: ScheduleKind = "constant"
    warmup_steps: int = 0
    steps: int | None = None
    decay_share: float = 0.2
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "constant":
            return
        if self.steps is None:
            raise ValueError(f"schedule {self.kind} needs the run's number of steps")
        if self.warmup_steps > self.decay_begins or self.decay_begins >= self.steps:
            raise ValueError(
                f"schedule {self.kind} cannot decay from step {self.decay_begins} of {self.steps} on after a warm-up of "
                f"{self.warmup_steps} steps"
            )

    @property
    def decay_begins(self) -> int:
        """The first step of the decay, whose factor is still 1. Not for a constant rate."""
        if self.kind == "wsd" and self.steps is not None:
            return self.steps - max(1, round(self.decay_share * self.steps))
        return self.warmup_steps

    def factor(self, step: int) -> float:
        """Of the step that starts from policy version `step` ≥ 0: above 0 and at most 1 before the run's end."""
        warm_up = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.kind == "constant" or self.steps is None or step < self.decay_begins:
            return warm_up
        progress = min(1.0, (step - self.decay_begins) / (self.steps - self.decay_begins))
        left = (1.0 + math.cos(math.pi * progress)) / 2.0 if self.kind == "cosine" else 1.0 - progress
        return self.floor + (1.0 - self.floor) * left
