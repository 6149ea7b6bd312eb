"""The corrections that `rollmesh bench staleness` compares, as settings of the trainer's own loss. No torch here.

Fixed before the table was measured: bounds are those of the sources; caps, which sources leave to the task, the default of
`services.loss_settings`; the geometric bounds what was found on this task before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.loss_settings import CorrectionSettings, LossSettings
from services.policies.admission import most_updates
from services.settings import TrainerSettings
from services.wire.errors import UsageError
from trainer.formula import describe

UNCORRECTED = "none"


@dataclass(frozen=True)
class Arm:
    """`updates_per_batch`: optimizer steps that share one proximal policy."""

    loss: LossSettings
    updates_per_batch: int = 1

    def settings(self, k: int) -> TrainerSettings:
        """The trainer's defaults but for the loss; no more steps a batch than K allows."""
        return TrainerSettings(loss=self.loss, updates_per_batch=min(self.updates_per_batch, most_updates(k)))

    def formula(self, k: int) -> str:
        """Loss and advantage in force."""
        settings = self.settings(k)
        steps = settings.updates_per_batch
        return describe(settings) + (f";  {steps} optimizer steps a batch" if steps > 1 else "")


def _plain(**correction: object) -> LossSettings:
    return LossSettings(policy="policy_gradient", correction=CorrectionSettings.model_validate(correction))


ARMS: Mapping[str, Arm] = {
    UNCORRECTED: Arm(_plain()),
    # Schulman et al. 2017: ε = 0.2.
    "PPO": Arm(LossSettings(policy="ppo_clip", clip_low=0.2, clip_high=0.2)),
    # Four minibatches a batch, as AReaL (arXiv:2505.24298) runs it: with one it would be truncated importance sampling.
    "decoupled": Arm(
        LossSettings(policy="ppo_clip", anchor="proximal", correction=CorrectionSettings(weight="token", cap=2.0)),
        updates_per_batch=4,
    ),
    "TIS": Arm(_plain(weight="token", cap=2.0)),
    # Bounds 0.5 and 5 (arXiv:2510.18855).
    "IcePop": Arm(_plain(weight="token", cap=math.inf, mask="token", mask_low=0.5, mask_high=5.0)),
    "geometric": Arm(_plain(weight="token", cap=2.0, mask="geometric", mask_low=0.8, mask_high=1.25)),
    "sequence": Arm(_plain(weight="sequence", cap=2.0)),
    # No lower bound (arXiv:2506.13585); weights of at most 5 (ScaleRL, arXiv:2510.13786).
    "CISPO": Arm(LossSettings(policy="cispo", clip_low=1.0, clip_high=4.0)),
    # 3e-4, 4e-4 and a mean over segments (arXiv:2507.18071, section 5.1).
    "GSPO": Arm(LossSettings(policy="gspo", clip_low=3e-4, clip_high=4e-4, mean="segments")),
}


def named_arms(names: Sequence[str]) -> list[str]:
    """The arms' names in their own order and spelling; upper and lower case are the same. Raises UsageError."""
    known = {name.lower(): name for name in ARMS}
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise UsageError(f"no correction {unknown[0]!r}", f"known: {', '.join(ARMS)}")
    asked = {name.lower() for name in names}
    return [name for lower, name in known.items() if lower in asked]
