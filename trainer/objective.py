"""The objective: `LossSettings` resolved into one callable, and the formula it computes as text.

logprobs ──► term (trainer.losses) ──× weight (trainer.corrections)──► per-token loss
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.settings import LossSettings
from trainer.corrections import truncated_is
from trainer.formula import describe_loss
from trainer.losses.policy_gradient import policy_gradient
from trainer.losses.ppo_clip import ppo_clip


@dataclass(frozen=True)
class TokenLoss:
    """`loss`: float `[B, W]`, with gradient. `clipped`: bool `[B, W]`, where the clip binds; None without a clip."""

    loss: Tensor
    clipped: Tensor | None


class Objective:
    """`formula` says exactly what is computed. Raises UsageError for settings of which one would have no effect."""

    def __init__(self, settings: LossSettings) -> None:
        self.formula = describe_loss(settings)
        self._settings = settings

    @property
    def needs_proximal(self) -> bool:
        """Whether the clipped ratio is taken against logprobs of the policy before the step."""
        return self._settings.policy == "ppo_clip" and self._settings.anchor == "proximal"

    def __call__(self, logprobs: Tensor, behaviour: Tensor, proximal: Tensor | None, advantages: Tensor) -> TokenLoss:
        """Per-token loss.

        `logprobs`: current, float `[B, W]`, with gradient; `behaviour`: the engine's; `advantages`: `[B, 1]`.
        `proximal`: those before the step; None where `needs_proximal` is False and the step is the first on its batch (the
        current ones are meant then).
        """
        settings = self._settings
        before = logprobs.detach() if proximal is None else proximal
        clipped = None
        if settings.policy == "ppo_clip":
            anchor = behaviour if settings.anchor == "behaviour" else before
            loss, clipped = ppo_clip(logprobs, anchor, advantages, settings.clip_low, settings.clip_high)
        else:
            loss = policy_gradient(logprobs, advantages)
        if settings.correction == "truncated_is":
            loss = loss * truncated_is(before, behaviour, settings.truncated_is_cap)
        return TokenLoss(loss, clipped)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum where `mask` is set. What stands elsewhere may be anything, even infinite: it must not become 0 · ∞."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum()
