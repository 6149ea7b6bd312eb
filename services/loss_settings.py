"""The loss, part by part. `trainer.formula` says what a choice of these computes, and refuses choices without effect."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.section import Section


class CorrectionSettings(Section):
    """Weights of tokens that another policy drew; `trainer.corrections` has the formulas and their sources.

    ρ = π_prox/π_beh at a token; of a segment, `sequence` takes the product, `geometric` the geometric mean.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none", description="The ratio that a token's loss is multiplied by"
    )
    cap: float = Field(default=2.0, gt=0.0, description="Largest weight; inf: unbounded")
    mask: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none", description="The ratio outside whose bounds tokens are left out of the loss"
    )
    mask_low: float = Field(default=0.5, ge=0.0)
    mask_high: float = Field(default=5.0, gt=0.0)
    veto: float | None = Field(
        default=None, gt=0.0, description="Segments with a token of a smaller ratio are left out whole"
    )


class LossSettings(Section):
    """Each part explicit; the formula in force is printed when the trainer starts."""

    policy: str = Field(
        default="ppo_clip",
        description="ppo_clip, policy_gradient, cispo, gspo, or a function of your own as module:function",
    )
    anchor: Literal["behaviour", "proximal", "interpolated"] = Field(
        default="behaviour", description="The policy that the ratio is taken against"
    )
    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    clip_high: float = Field(default=0.2, gt=0.0)
    dual_clip: float | None = Field(default=None, gt=1.0, description="ppo_clip: bound for bad tokens (none: no bound)")
    mean: Literal["tokens", "segments", "fixed"] = Field(
        default="tokens", description="Over the batch's tokens, over segments of tokens, or a sum over a fixed length"
    )
    fixed_length: int = Field(default=1024, ge=1, description="mean = fixed: the tokens that a segment counts for")
    entropy: float = Field(default=0.0, ge=0.0, description="Coefficient of the policy's entropy, which is rewarded")
    kl: float = Field(default=0.0, ge=0.0, description="Coefficient of the divergence from the run's first policy")
    kl_estimator: Literal["k2", "k3"] = "k3"
    correction: CorrectionSettings = CorrectionSettings()
