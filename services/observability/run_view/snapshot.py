"""Snapshot: all that a view shows at one moment. It is a function of this alone, so that a recorded one shows the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.policies.progress.bottleneck import Bound
from services.policies.progress.phase import Phase, left_s
from services.run_store.status import Wait
from services.wire.rollout_api import EngineReport, Evaluation
from services.wire.run_metrics import Sample, StepMetrics


@dataclass
class History:
    """A figure of each step so far. `took_s`: seconds from the step before it, less those that the run stood still."""

    success: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def add(self, line: StepMetrics) -> None:
        self.success.append(line.success)
        self.reward.append(line.reward)
        self.length.append(line.response_length)
        self.took_s.append(line.step_ms / 1e3)


@dataclass(frozen=True)
class Snapshot:
    """`at`: Unix seconds. `metrics` is None before the first step; `engines` holds those that answered."""

    steps: int
    k: int
    at: float
    elapsed_s: float
    phase: Phase
    metrics: StepMetrics | None = None
    history: History = field(default_factory=History)
    engines: Sequence[EngineReport] = ()
    waits: dict[str, Wait] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    """The newest one beside training."""
    sample: Sample | None = None
    """The newest one."""
    bound: Bound | None = None

    @property
    def step(self) -> int:
        return 0 if self.metrics is None else self.metrics.step

    @property
    def stall_ms(self) -> float | None:
        """The last commit's stall, on the engine where it was longest."""
        return max((engine.stalls_ms[-1] for engine in self.engines if engine.stalls_ms), default=None)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, by the pace of the last ones; None where there is no pace yet."""
        return left_s(self.history.took_s, self.steps) if self.phase.name == "training" else None
