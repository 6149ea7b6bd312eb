"""A loss that cannot cope with certain batches: `trainer.loss.policy = "tests.support.fragile_loss:fragile"`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from services.config.training.algorithm import LossSettings
from services.wire.packed import pack_logprobs, unpack_logprobs, unpack_mask
from services.wire.trajectory import Trajectory
from trainer.algorithms.losses.ppo_clip import ppo_clip
from trainer.algorithms.losses.registry import LOSSES, LossEntry
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss

NAME = "tests.support.fragile_loss:fragile"
NOT_FINITE, BROKEN = -600.0, -700.0
"""Behaviour logprobs of tokens whose loss is no number, and of those that there is no loss for."""


def fragile(tokens: LossTokens, settings: LossSettings) -> TokenLoss:
    least = float(tokens.behaviour.min())
    if least == BROKEN:
        raise RuntimeError("no kernel for this batch")
    loss = ppo_clip(tokens, settings)
    return TokenLoss(loss.loss * math.nan, loss.clipped) if least == NOT_FINITE else loss


fragile.entry = LossEntry(NAME, LOSSES["ppo_clip"].term, LOSSES["ppo_clip"].uses)  # type: ignore[attr-defined]


def marked(trajectories: Sequence[Trajectory], mark: float) -> list[Trajectory]:
    """The same, each sampled token of which bears the mark."""
    return [
        msgspec.structs.replace(
            one,
            segments=[
                msgspec.structs.replace(
                    segment,
                    logprobs=pack_logprobs(
                        [
                            mark if sampled else float(logprob)
                            for sampled, logprob in zip(
                                unpack_mask(segment.loss_mask), unpack_logprobs(segment.logprobs), strict=True
                            )
                        ]
                    ),
                )
                for segment in one.segments
            ],
        )
        for one in trajectories
    ]
