"""The training objective: `LossSettings` resolved into one callable, and its formula as text.

logprobs ──► term (registry) ──× weight, mask (correction)──► + kl, − entropy ──► per-token loss [N]
                                                             per-token loss ──mean──► loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.config.training.algorithm import LossSettings
from trainer.algorithms.columns import LossColumn
from trainer.algorithms.describe import describe_loss
from trainer.algorithms.divergence import divergence
from trainer.algorithms.losses.correction import correction
from trainer.algorithms.losses.registry import find_loss, make_loss
from trainer.algorithms.losses.tokens import BatchSize, LossTokens, mean_by_segment


@dataclass(frozen=True)
class TokenTerms:
    """The `N` fresh tokens of a micro-batch, flat, all `[N]`; `logprobs` and `entropy` with gradient.

    `behaviour`: the engine's logprobs; `proximal`: those before the batch, None where this is its first step (the
    current ones are meant then); `reference`: of the run's first policy; `entropy`: of the policy there. The last two where
    the objective needs them. `advantages`; `staleness` in optimizer steps; `segment`: int64, `0 … segments − 1`.

    For a loss that names them: `group` int64, of its batch; `teacher`: its logprobs; `values` and `returns`: the critic's.
    """

    logprobs: Tensor
    behaviour: Tensor
    proximal: Tensor | None
    advantages: Tensor
    staleness: Tensor
    segment: Tensor
    segments: int
    reference: Tensor | None = None
    entropy: Tensor | None = None
    group: Tensor | None = None
    teacher: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def column(self, name: LossColumn) -> Tensor:
        """Raises ValueError where whoever made these left it out."""
        found: Tensor | None = getattr(self, name)
        if found is None:
            raise ValueError(f"the tokens were made without {name}, which the loss reads")
        return found.long() if name == "staleness" else found


@dataclass(frozen=True)
class Judged:
    """`loss`: float `[N]`, with gradient. Bool `[N]`, None where not used: `clipped`, a bound removes the gradient;
    `kept`, not masked by the correction. `weight`: float `[N]`, the correction's. `figures`: the loss's own, `[N]`."""

    loss: Tensor
    clipped: Tensor | None = None
    weight: Tensor | None = None
    kept: Tensor | None = None
    figures: Mapping[str, Tensor] = field(default_factory=dict)


class Objective:
    """`formula`: what is computed, as text. Raises UsageError for a setting without effect."""

    def __init__(self, settings: LossSettings) -> None:
        self.formula = describe_loss(settings)
        self._settings = settings
        self._entry = find_loss(settings.policy)
        self._loss = make_loss(settings)

    @property
    def needs_proximal(self) -> bool:
        """Whether the ratio is taken against logprobs of the policy before the batch."""
        return self._entry.ratio is not None and self._settings.anchor == "proximal"

    @property
    def needs_reference(self) -> bool:
        return self._settings.kl > 0.0 or self.reads("reference")

    @property
    def needs_entropy(self) -> bool:
        return self._settings.entropy > 0.0 or self.reads("entropy")

    def reads(self, column: LossColumn) -> bool:
        """Whether the loss's entry names it."""
        return column in self._entry.columns

    @property
    def idle_at_zero(self) -> bool:
        """Whether a token's loss is exactly 0 where its advantage is, and nothing else is learnt from it."""
        settings = self._settings
        adds = any((settings.kl, settings.entropy, settings.router_aux, settings.positive))
        return self._entry.idle_at_zero and not adds

    def __call__(self, terms: TokenTerms) -> Judged:
        """Per-token loss. Masked tokens have loss 0, and still count in the denominator of the mean."""
        settings = self._settings
        before = terms.logprobs.detach() if terms.proximal is None else terms.proximal
        if settings.anchor == "interpolated":
            before = interpolated(terms.logprobs, terms.behaviour, terms.staleness)
        tokens = LossTokens(
            logprobs=terms.logprobs,
            anchor=terms.behaviour if settings.anchor == "behaviour" else before,
            behaviour=terms.behaviour,
            proximal=before,
            advantages=terms.advantages,
            segment=terms.segment,
            segments=terms.segments,
            columns={name: terms.column(name) for name in self._entry.columns},
        )
        judged = self._loss(tokens, settings)
        loss = judged.loss
        weight, kept = correction(tokens, settings.correction)
        if weight is not None:
            loss = loss * weight
        if kept is not None:
            loss = torch.where(kept, loss, torch.zeros((), dtype=loss.dtype, device=loss.device))
        if settings.kl and terms.reference is not None:
            loss = loss + settings.kl * divergence(terms.logprobs, terms.reference, settings.kl_estimator)
        if settings.entropy and terms.entropy is not None:
            loss = loss - settings.entropy * terms.entropy
        return Judged(loss, judged.clipped, weight, kept, judged.figures)

    def mean(self, loss: Tensor, segment: Tensor, segments: int, of: BatchSize) -> Tensor:
        """This micro-batch's share of the batch's loss: the shares of all micro-batches add up to it."""
        if self._settings.mean == "tokens":
            return loss.sum() / of.tokens
        if self._settings.mean == "fixed":
            return loss.sum() / (of.segments * self._settings.fixed_length)
        return mean_by_segment(loss, segment, segments).sum() / of.segments

    def positive(self, logprobs: Tensor, right: Tensor, of: BatchSize) -> Tensor:
        """This micro-batch's share of the language-model loss on right answers, with its coefficient (VAPO, Yue et al.
        2025, arXiv:2504.05118, section 4.3):

            μ · −(1/N⁺) Σ log π(x_t)            over the N⁺ fresh tokens of right answers; 0 where there are none

        `logprobs` `[N]`, with gradient; `right` bool `[N]`.
        """
        found = -self._settings.positive * torch.where(right, logprobs, torch.zeros_like(logprobs)).sum()
        return found / max(1, of.right)


@torch.no_grad()
def interpolated(logprobs: Tensor, behaviour: Tensor, staleness: Tensor) -> Tensor:
    """Proximal logprobs without a forward pass (A-3PO, Li et al. 2025, arXiv:2512.06547, section 3), by interpolation:

        log π_prox ≈ log π_beh + α·(log π − log π_beh)         α = d / (d + 1), without gradient

    d, `staleness`: optimizer steps between the policy that sampled the token and the start of this step.
    """
    share = staleness / (staleness + 1)
    return behaviour + share * (logprobs - behaviour)
