"""Settings of the loss and of the advantage estimator: a class for what each loss and estimator reads, composed into two
flat sections.

`trainer.algorithms.describe` prints the formula that a choice computes, and refuses settings without effect. In a file the
order of keys follows the classes: the base named last comes first.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, JsonValue, model_validator

from services.config.base import Section

Finite = Annotated[float, Field(allow_inf_nan=False)]
Own = dict[str, JsonValue]
"""Settings of an algorithm of the user's own, as they stand in the file. Who knows its code validates them
(`trainer.algorithms.plugins`); every other process hands them on."""


class CorrectionSettings(Section):
    """Importance weights of off-policy tokens; formulas and sources: `trainer.algorithms.losses.correction`.

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


class RatioBounds(Section):
    """What cispo and gspo read."""

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    clip_high: float = Field(default=0.2, gt=0.0)


class PpoClipSettings(RatioBounds):
    dual_clip: float | None = Field(default=None, gt=1.0, description="ppo_clip: bound for bad tokens (none: no bound)")


class LossChoice(Section):
    policy: str = Field(
        default="ppo_clip",
        description="ppo_clip, policy_gradient, cispo, gspo, or a function of your own as module:function",
    )
    anchor: Literal["behaviour", "proximal", "interpolated"] = Field(
        default="behaviour", description="The policy that the ratio is taken against"
    )


class LossSettings(PpoClipSettings, LossChoice):
    """The settings of all losses, and what they share. The formula in force is printed when the trainer starts."""

    mean: Literal["tokens", "segments", "fixed"] = Field(
        default="tokens", description="Over the batch's tokens, over segments of tokens, or a sum over a fixed length"
    )
    fixed_length: int = Field(default=1024, ge=1, description="mean = fixed: the tokens that a segment counts for")
    entropy: float = Field(default=0.0, ge=0.0, description="Coefficient of the policy's entropy, which is rewarded")
    kl: float = Field(default=0.0, ge=0.0, description="Coefficient of the divergence from the run's first policy")
    kl_estimator: Literal["k2", "k3"] = "k3"
    positive: float = Field(
        default=0.0, ge=0.0, description="Coefficient of −log π over the tokens of right answers (VAPO)"
    )
    router_aux: float = Field(
        default=0.0, ge=0.0, description="Coefficient of the load-balancing loss of a mixture of experts"
    )
    correction: CorrectionSettings = CorrectionSettings()
    own: Own = Field(default={}, description="Settings of a loss of your own, as its entry declares them")


GREEDY_BASELINE = "remax"
"""The estimator that compares with an answer sampled greedily: the first sibling of each group is that one."""
DISTILLATION = "opd"
"""The estimator that reads a teacher's logprobs and no reward."""


class CriticSettings(Section):
    """The value function of `estimator = gae`: the run's first policy with a head of one number."""

    learning_rate: float = Field(default=1e-3, gt=0.0, description="Constant; the optimizer is as the policy's")
    clip: float = Field(
        default=0.2, gt=0.0, description="How far a value may move from that before the batch; inf: unbounded"
    )
    trace: float | None = Field(
        default=None, ge=0.0, le=1.0, description="λ of its targets (none: that of the advantages); 1: what is earned"
    )
    pretrain_steps: int = Field(
        default=0, ge=0, description="The run's first optimizer steps, in which it learns alone and the policy stays"
    )


class CostSettings(Section):
    """A constraint on a mean cost, with a Lagrange multiplier in the reward (Safe RLHF)."""

    component: str | None = Field(
        default=None, min_length=1, description="Reward component that is the cost; none: there is no cost"
    )
    limit: float = Field(default=0.0, description="The mean cost of a trajectory that is allowed")
    price: float = Field(default=1.0, gt=0.0, description="The multiplier that the run begins with")
    learning_rate: float = Field(default=0.1, gt=0.0, description="Of the multiplier's logarithm")
    largest: float = Field(default=5.0, gt=0.0, description="Largest multiplier")


class RewardShaping(Section):
    """What becomes of an environment's reward before penalties and costs (`trainer.algorithms.advantages.shaping`)."""

    clip: tuple[Finite, Finite] | None = Field(default=None, description="Least and largest reward (none: no bounds)")
    scale: float = Field(default=1.0, gt=0.0, allow_inf_nan=False, description="What rewards are multiplied by")
    normalise: bool = Field(
        default=False,
        description="Less the mean of the task's rewards so far, divided by their standard deviation",
    )

    @model_validator(mode="after")
    def _holds_values(self) -> RewardShaping:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip = [{self.clip[0]:g}, {self.clip[1]:g}] leaves one value at most")
        return self


class GrpoSettings(Section):
    std: bool = Field(default=True, description="grpo: divide by the group's standard deviation (Dr. GRPO does not)")


class ReinforcePpSettings(Section):
    discount: float = Field(default=1.0, gt=0.0, le=1.0, description="γ a token, for reinforce_pp and gae")


class GaeSettings(ReinforcePpSettings):
    trace: float = Field(default=0.95, ge=0.0, le=1.0, description="gae: λ")
    trace_alpha: float | None = Field(
        default=None, gt=0.0, description="gae: λ = 1 − 1/(α·l) for l sampled tokens, in place of trace (VAPO: 0.05)"
    )
    whiten: bool = Field(default=True, description="gae: mean 0 and standard deviation 1 over the batch's tokens")


class DistillationSettings(Section):
    """The teacher's part of the advantage: what opd is, and what others may add."""

    distil: float | None = Field(
        default=None,
        gt=0.0,
        description="Coefficient of the reverse KL from the teacher at each token (none: 1 for opd, 0 for others)",
    )
    distil_discount: float = Field(
        default=0.0, ge=0.0, le=1.0, description="γ a token of that KL's later terms; 0: each token has its own alone"
    )

    @property
    def distil_coefficient(self) -> float:
        """That of opd where none is set."""
        return 1.0 if self.distil is None else self.distil


class EstimatorChoice(Section):
    estimator: str = Field(
        default="grpo",
        description="grpo, rloo, remax, reinforce_pp, reinforce_pp_baseline, gae, opd, or your own as module:function",
    )


class AdvantageSettings(GaeSettings, GrpoSettings, DistillationSettings, EstimatorChoice):
    """The settings of all estimators, and what they share. The formula in force is printed when the trainer starts."""

    kl: float = Field(default=0.0, ge=0.0, description="Coefficient of the divergence from the first policy, in reward")
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    overlong_length: int | None = Field(
        default=None, ge=1, description="Sampled tokens from which on an answer is fined in full (none: no fine)"
    )
    overlong_buffer: int = Field(default=1, ge=1, description="Tokens before overlong_length over which the fine grows")
    keep: Literal["all", "best", "best_random", "best_worst"] = Field(
        default="all", description="Which siblings of a group are trained on, by reward (PF-PPO)"
    )
    dynamic_sampling: bool = Field(
        default=False, description="Drop groups whose rewards are all equal, and make up for them (DAPO)"
    )
    dynamic_sampling_most: int = Field(
        default=64, ge=1, description="Groups dropped so for one batch; after that they are trained as they are"
    )
    reward: RewardShaping = RewardShaping()
    critic: CriticSettings = CriticSettings()
    cost: CostSettings = CostSettings()
    own: Own = Field(default={}, description="Settings of an estimator of your own, as its entry declares them")

    @property
    def greedy_baseline(self) -> bool:
        """Whether the first sibling of each group is sampled greedily, to compare the others with."""
        return self.estimator == GREEDY_BASELINE


class Formula(msgspec.Struct, frozen=True):
    """What `rollmesh formula --json` says of a choice of loss and advantage.

    `loss`, `advantage`: settings of algorithms of the user's own, with their defaults.
    """

    formula: str
    loss: dict[str, Any]
    advantage: dict[str, Any]
