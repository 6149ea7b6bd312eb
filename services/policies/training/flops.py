"""Floating-point operations of a training step, and what share of a card's arithmetic they are (model FLOPs utilisation).

Of a token that goes through P weights of products (the head, not the embedding), and in each of L layers looks back on n
tokens with H heads of D (Kaplan et al. 2020, arXiv:2001.08361, section 2.1):

    forward 2·P + 4·L·H·D·n, backward twice that; where the weights are frozen, as under adapters, backward 2·P + 8·L·H·D·n

What checkpointing computes once more is not counted (PaLM, arXiv:2204.02311, appendix B). A prefix that siblings share is
counted once, as it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""A second, dense bfloat16 with sums in float32, by the makers' data sheets."""


def peak_flops(card: str) -> float | None:
    """Of a card by its name, a second; None for one that is not known here."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in card), None)


@dataclass(frozen=True)
class StepCost:
    """`weights`: that a token goes through, of experts those that are chosen. `attention`: L·H·D. `frozen`: adapters alone
    are trained."""

    weights: int
    attention: int
    frozen: bool = False

    def flops(self, runs: Iterable[tuple[int, int, int]]) -> float:
        """Forward and backward of causal rows: (tokens of a row, tokens before them that it shares, how many rows)."""
        tokens = looks = 0.0
        for own, before, count in runs:
            tokens += own * count
            # Its own tokens see half of each other in the mean.
            looks += count * own * (before + own / 2)
        products, attention = 2.0 * self.weights * tokens, 4.0 * self.attention * looks
        return 2 * products + 3 * attention if self.frozen else 3 * (products + attention)
