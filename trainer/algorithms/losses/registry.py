"""All policy losses by name: where its function is, its formula as text, and which settings it reads. No torch here.

A loss of your own needs no line here: set `trainer.loss.policy = "your_package.your_module:your_loss"`, a function of
`(LossTokens, LossSettings)` with an attribute `entry`, a `LossEntry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.config.algorithm import LossSettings, PpoClipSettings, RatioBounds
from trainer.algorithms.plugins import find_entry, load_function

if TYPE_CHECKING:
    from trainer.algorithms.losses.tokens import LossTokens, TokenLoss

PolicyLoss = Callable[["LossTokens", LossSettings], "TokenLoss"]

_RATIO_BOUNDS = tuple(RatioBounds.model_fields)


@dataclass(frozen=True)
class LossEntry:
    """`term`: what is maximised at each token, as text with `{setting}` in it. `uses`: names of the settings it reads.

    `ratio`: whether the ratio to the anchor policy is of a token or of a segment; None for a loss without a ratio.
    `idle_at_zero`: the loss of a token is exactly 0 where its advantage is 0, so it need not be computed.
    """

    target: str
    term: str
    uses: tuple[str, ...] = ()
    ratio: Literal["token", "segment"] | None = "token"
    idle_at_zero: bool = False


LOSSES: Mapping[str, LossEntry] = {
    "ppo_clip": LossEntry(
        "trainer.algorithms.losses.ppo_clip:ppo_clip",
        "min(r·A, clip(r, 1−{clip_low:g}, 1+{clip_high:g})·A)",
        tuple(PpoClipSettings.model_fields),
        idle_at_zero=True,
    ),
    "policy_gradient": LossEntry(
        "trainer.algorithms.losses.policy_gradient:policy_gradient", "A·log π", ratio=None, idle_at_zero=True
    ),
    "cispo": LossEntry(
        "trainer.algorithms.losses.cispo:cispo",
        "sg(clip(r, 1−{clip_low:g}, 1+{clip_high:g}))·A·log π",
        _RATIO_BOUNDS,
        idle_at_zero=True,
    ),
    "gspo": LossEntry(
        "trainer.algorithms.losses.gspo:gspo",
        "min(s·A, clip(s, 1−{clip_low:g}, 1+{clip_high:g})·A)",
        _RATIO_BOUNDS,
        ratio="segment",
        idle_at_zero=True,
    ),
}


def find_loss(name: str) -> LossEntry:
    """The entry of a loss by name, or of a function named `module:function`. Raises UsageError where there is none."""
    return find_entry(name, LOSSES, LossEntry, "trainer.loss.policy")


def load_loss(name: str) -> PolicyLoss:
    """The function itself. Raises UsageError as `find_loss` does."""
    function: PolicyLoss = load_function(name if ":" in name else find_loss(name).target)
    return function
