"""All policy losses by name: where its function is, its formula as text, and which settings it reads. No torch here.

A loss of your own needs no line here: set `trainer.loss.policy = "your_package.your_module:your_loss"`, a function of
`(LossTokens, LossSettings)` with an attribute `entry`, a `LossEntry`. With settings of its own it gets them third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from services.config.base import Section
from services.config.training.algorithm import LossSettings, PpoClipSettings, RatioBounds
from trainer.algorithms.columns import LOSS_COLUMNS, LossColumn, check_columns
from trainer.algorithms.plugins import bound, find_entry, load_function, own_settings

if TYPE_CHECKING:
    from trainer.algorithms.losses.tokens import LossTokens, TokenLoss

PolicyLoss = Callable[["LossTokens", LossSettings], "TokenLoss"]

_RATIO_BOUNDS = tuple(RatioBounds.model_fields)


@dataclass(frozen=True)
class LossEntry:
    """`term`: what is maximised at each token, as text with `{setting}` in it. `uses`: names of the settings it reads.

    `ratio`: whether the ratio to the anchor policy is of a token or of a segment; None for a loss without a ratio.
    `idle_at_zero`: the loss of a token is exactly 0 where its advantage is 0, so it need not be computed. `columns`: what
    it reads beyond its plain input (`trainer.algorithms.columns`). `settings`: its own, under `trainer.loss.own`.
    """

    target: str
    term: str
    uses: tuple[str, ...] = ()
    ratio: Literal["token", "segment"] | None = "token"
    idle_at_zero: bool = False
    columns: tuple[LossColumn, ...] = ()
    settings: type[Section] | None = None


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
    entry = find_entry(name, LOSSES, LossEntry, "trainer.loss.policy")
    check_columns(entry.columns, LOSS_COLUMNS, f"loss {name}")
    return entry


def load_loss(name: str) -> Callable[..., TokenLoss]:
    """The function itself. Raises UsageError as `find_loss` does."""
    function: Callable[..., TokenLoss] = load_function(name if ":" in name else find_loss(name).target)
    return function


def own_of(loss: LossSettings) -> Section | None:
    """The settings of a loss of the user's own; None where it has none. Raises UsageError for keys that it has not."""
    return own_settings(find_loss(loss.policy).settings, loss.own, "loss", f"loss.policy={loss.policy}")


def make_loss(loss: LossSettings) -> PolicyLoss:
    """The function that is chosen, with its own settings. Raises UsageError as `own_of` does."""
    return bound(load_loss(loss.policy), own_of(loss))
