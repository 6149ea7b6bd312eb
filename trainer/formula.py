"""The loss in force, as text; choices that would silently have no effect are refused. No torch: asked before its import.

    L = −(1/N) Σ over fresh sampled tokens of [weight ·] term         N: fresh sampled tokens of the whole batch

| policy          | term                                   | source                                          |
|-----------------|----------------------------------------|-------------------------------------------------|
| ppo_clip        | min(r·A, clip(r, 1−low, 1+high)·A)     | Schulman et al. 2017, arXiv:1707.06347, eq. 7   |
| policy_gradient | A·log π                                | Williams 1992                                   |

| anchor    | r              | with a correction                                                               |
|-----------|----------------|---------------------------------------------------------------------------------|
| behaviour | π / π_beh      | none: the ratio is already taken against the policy that drew the tokens        |
| proximal  | π / π_prox     | weight on top: decoupled PPO (Hilton et al. 2022, arXiv:2110.00641)             |
"""

from __future__ import annotations

from services.settings import LossSettings
from services.wire.errors import UsageError

_DEFAULTS = LossSettings()


def describe_loss(loss: LossSettings) -> str:
    """One line with the exact formula in force. Raises UsageError for choices of which one would have no effect."""
    _refuse_idle_choices(loss)
    weight = f"min(π_prox/π_beh, {loss.truncated_is_cap:g})·" if loss.correction == "truncated_is" else ""
    if loss.policy == "policy_gradient":
        term, legend = "A·log π", []
    else:
        term = f"min(r·A, clip(r, 1−{loss.clip_low:g}, 1+{loss.clip_high:g})·A)"
        legend = [f"r = π/π_{'beh' if loss.anchor == 'behaviour' else 'prox'}"]
    legend += [
        "A = (R − mean)/(std + 1e-4) over the group",
        "N = fresh sampled tokens of the batch",
        "π_beh = the engine's own logprobs",
    ]
    if weight or loss.anchor == "proximal":
        legend.append("π_prox = the policy before the step")
    return f"L = −(1/N) Σ {weight}{term};  {', '.join(legend)}"


def _refuse_idle_choices(loss: LossSettings) -> None:
    if loss.correction == "none" and loss.truncated_is_cap != _DEFAULTS.truncated_is_cap:
        raise _idle(
            "truncated_is_cap", loss.truncated_is_cap, "loss.correction=none", "set loss.correction=truncated_is"
        )
    if loss.policy == "policy_gradient":
        for name in ("anchor", "clip_low", "clip_high"):
            value = getattr(loss, name)
            if value != getattr(_DEFAULTS, name):
                raise _idle(
                    name, value, "loss.policy=policy_gradient, which has no ratio", "leave it out, or use ppo_clip"
                )
    elif loss.correction == "truncated_is" and loss.anchor == "behaviour":
        raise UsageError(
            "trainer.loss.correction=truncated_is with loss.anchor=behaviour would correct twice: the clipped ratio is "
            "taken against the behaviour policy already",
            "set loss.anchor=proximal, or loss.correction=none",
        )


def _idle(name: str, value: object, under: str, remedy: str) -> UsageError:
    return UsageError(f"trainer.loss.{name}={value} would have no effect under {under}", remedy)
