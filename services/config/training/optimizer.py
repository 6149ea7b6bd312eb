"""Settings of the optimizer and of the learning rate's schedule.

`trainer.model.optimizer` makes the optimizer, `services.policies.training.schedule` has the schedule's formula.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section
from services.policies.training.schedule import Schedule, ScheduleKind


class MuonSettings(Section):
    """What kind = muon reads, beside the learning rate and the weight decay that it shares with AdamW."""

    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    nesterov: bool = Field(default=True, description="Whether the gradient is added to its momentum once more")
    iterations: int = Field(
        default=5, ge=1, lt=100, description="Newton-Schulz iterations that make an update orthogonal"
    )


class OptimizerSettings(Section):
    """The optimizer of the policy, and of a critic."""

    kind: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: for hidden matrices, with AdamW for embeddings, heads, norms and biases",
    )
    state_bits: Literal[32, 8] = Field(
        default=32, description="Of AdamW's two moments: 8 keeps codes with a scale for every 256"
    )
    offload: bool = Field(default=False, description="On a GPU, its state is in the host's memory between steps")
    epsilon: float = Field(default=1e-8, gt=0.0, description="Of AdamW's denominator")
    decay_norms_and_biases: bool = Field(
        default=False, description="Whether weight_decay also holds for one-dimensional weights"
    )
    muon: MuonSettings = MuonSettings()


class ScheduleSettings(Section):
    """The learning rate behind the warm-up."""

    kind: ScheduleKind = Field(
        default="constant",
        description="linear, cosine: decay from the warm-up to the run's end; wsd: constant, then a linear decay",
    )
    decay_share: float = Field(
        default=0.2, gt=0.0, le=1.0, description="wsd: share of the run's steps, the last ones, over which it decays"
    )
    floor: float = Field(default=0.0, ge=0.0, lt=1.0, description="Share of learning_rate that the decay ends at")

    def of_run(self, warmup_steps: int, steps: int | None) -> Schedule:
        """The schedule of a run of `steps` optimizer steps. Raises ValueError as `Schedule` does."""
        return Schedule(
            kind=self.kind, warmup_steps=warmup_steps, steps=steps, decay_share=self.decay_share, floor=self.floor
        )
