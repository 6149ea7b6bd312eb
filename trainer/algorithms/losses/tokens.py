"""Input and output of a policy loss: the fresh sampled tokens of a micro-batch, flat, and the segment of each.

packed row [1, T] ── fresh tokens ──► [N]        without the environment's tokens and those over K
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.algorithms.columns import LossColumn, declared


@dataclass(frozen=True)
class BatchSize:
    """Denominators of the mean over a batch: its fresh tokens, and the segments that have any; skipped ones count.

    `right`: fresh tokens of right answers, of the rows that are not skipped.
    """

    tokens: int
    segments: int
    right: int = 0


LARGEST_LOG_RATIO = 20.0
"""Beyond e^±20 a float32 ratio overflows sooner or later, and 0 · ∞ in the backward pass would poison every weight."""


@dataclass(frozen=True)
class LossTokens:
    """`N` sampled tokens of `segments` segments. All `[N]` and without gradient, but for `logprobs`.

    `logprobs`: of the policy under training, with gradient; `anchor`: of the policy that the ratio is taken against;
    `behaviour`: of the engine's that sampled the token; `proximal`: of the one before the step or batch. `advantages`:
    equal within a segment unless a critic gave them. `segment`: int64, `0 … segments − 1`. `columns`: those that the
    loss's entry names.
    """

    logprobs: Tensor
    anchor: Tensor
    behaviour: Tensor
    proximal: Tensor
    advantages: Tensor
    segment: Tensor
    segments: int
    columns: Mapping[LossColumn, Tensor] = field(default_factory=dict)

    def column(self, name: LossColumn) -> Tensor:
        """`[N]`: a column that the loss's entry names. Raises UsageError for another."""
        return declared(self.columns, name)

    def log_ratio(self) -> Tensor:
        """log π/π_anchor, bounded so that its exponential is finite in float32."""
        return (self.logprobs - self.anchor).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)

    def sum_by_segment(self, values: Tensor) -> Tensor:
        """`[segments]`: the sum of `values` `[N]` over each segment's tokens."""
        return sum_by_segment(values, self.segment, self.segments)

    def mean_by_segment(self, values: Tensor) -> Tensor:
        """`[segments]`: the mean of `values` `[N]` over each segment's tokens; 0 for a segment without any."""
        return mean_by_segment(values, self.segment, self.segments)


def sum_by_segment(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """`[segments]`: the sum of `values` `[N]` over the tokens of each; `segment` int64 `[N]`."""
    return torch.zeros(segments, dtype=values.dtype, device=values.device).index_add(0, segment, values)


def mean_by_segment(values: Tensor, segment: Tensor, segments: int) -> Tensor:
    """As `sum_by_segment`, the mean; 0 for a segment without any token."""
    lengths = sum_by_segment(torch.ones_like(values), segment, segments)
    return sum_by_segment(values, segment, segments) / lengths.clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """`loss`: `[N]`, with gradient. `clipped`: bool `[N]`, where a bound removes the gradient; None without a bound.

    `figures`: `[N]` each, by name: their means over the step's tokens are in metrics.jsonl. The same names at each call.
    """

    loss: Tensor
    clipped: Tensor | None = None
    figures: Mapping[str, Tensor] = field(default_factory=dict)
