"""All policy losses by name: where each is, what it computes as text, and which settings it reads. No torch here.

A loss of your own needs no line here: set `trainer.loss.policy = "your_package.your_module:your_loss"`, a function of
`(LossTokens, LossSettings)` with an attribute `entry`, a `LossEntry`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from services.loss_settings import LossSettings
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from trainer.losses.tokens import LossTokens, TokenLoss

PolicyLoss = Callable[["LossTokens", LossSettings], "TokenLoss"]
_CLIP = ("clip_low", "clip_high")


@dataclass(frozen=True)
class LossEntry:
    """`term`: what is maximised at each token, as text with `{setting}` in it. `uses`: the settings it reads.

    `ratio`: of a token or of a whole segment, to the anchor, which then is a choice; None for a loss without one.
    """

    target: str
    term: str
    uses: tuple[str, ...] = ()
    ratio: Literal["token", "segment"] | None = "token"


LOSSES: Mapping[str, LossEntry] = {
    "ppo_clip": LossEntry(
        "trainer.losses.ppo_clip:ppo_clip",
        "min(r·A, clip(r, 1−{clip_low:g}, 1+{clip_high:g})·A)",
        (*_CLIP, "dual_clip"),
    ),
    "policy_gradient": LossEntry("trainer.losses.policy_gradient:policy_gradient", "A·log π", ratio=None),
    "cispo": LossEntry("trainer.losses.cispo:cispo", "sg(clip(r, 1−{clip_low:g}, 1+{clip_high:g}))·A·log π", _CLIP),
    "gspo": LossEntry(
        "trainer.losses.gspo:gspo", "min(s·A, clip(s, 1−{clip_low:g}, 1+{clip_high:g})·A)", _CLIP, ratio="segment"
    ),
}


def find_loss(name: str) -> LossEntry:
    """The entry of a loss by name, or of a function named `module:function`. Raises UsageError where there is none."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        near = get_close_matches(name, LOSSES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(LOSSES)}, or module:function"
        raise UsageError(f"trainer.loss.policy={name} is no policy loss", hint)
    entry = getattr(_load(name), "entry", None)
    if not isinstance(entry, LossEntry):
        raise UsageError(f"{name} has no `entry`", "give the function an attribute `entry = LossEntry(…)`")
    return entry


def load_loss(name: str) -> PolicyLoss:
    """The function itself. Raises UsageError as `find_loss` does."""
    function: PolicyLoss = _load(find_loss(name).target if ":" not in name else name)
    return function


def _load(target: str) -> PolicyLoss:
    module, _, attribute = target.partition(":")
    try:
        function: PolicyLoss = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target} cannot be imported ({error})", "write it as module:function") from error
    return function
