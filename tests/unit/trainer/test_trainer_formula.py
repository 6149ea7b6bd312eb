"""The formula in force says what is computed; choices without effect are refused; a loss of one's own is a function."""

from __future__ import annotations

from typing import Any

import pytest

from services.config.settings import TrainerSettings
from services.config.training.algorithm import LossSettings
from services.wire.errors import UsageError
from trainer.algorithms.describe import describe, describe_loss
from trainer.algorithms.losses.registry import LOSSES, LossEntry, load_loss
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss


def choose(**choices: Any) -> LossSettings:
    return LossSettings.model_validate(choices)


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"correction": {"weight": "token"}}, "correct twice"),
        ({"policy": "gspo", "correction": {"weight": "geometric"}}, "correct twice"),
        ({"policy": "policy_gradient", "clip_low": 0.1}, "clip_low=0.1 would have no effect"),
        ({"policy": "policy_gradient", "clip_high": 0.3}, "clip_high=0.3 would have no effect"),
        ({"policy": "policy_gradient", "anchor": "proximal"}, "anchor=proximal would have no effect"),
        ({"policy": "cispo", "dual_clip": 3.0}, "dual_clip=3.0 would have no effect"),
        ({"correction": {"cap": 3.0}}, "correction.cap=3.0 would have no effect"),
        ({"correction": {"mask_low": 0.1}}, "correction.mask_low=0.1 would have no effect"),
        ({"correction": {"mask": "token", "mask_low": 6.0}}, "lies above mask_high"),
        ({"fixed_length": 7}, "fixed_length=7 would have no effect"),
        ({"kl_estimator": "k2"}, "kl_estimator=k2 would have no effect"),
        ({"policy": "ppo_clp"}, "did you mean 'ppo_clip'"),
        ({"policy": "no_such_module:loss"}, "cannot be imported"),
        ({"policy": "math:sqrt"}, "has no `entry`"),
    ],
)
def test_choices_without_effect_are_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe_loss(choose(**choices))


@pytest.mark.parametrize(
    ("choices", "parts"),
    [
        ({}, ["−(1/N) Σ min(r·A, clip(r, 1−0.2, 1+0.2)·A)", "r = π/π_beh"]),
        ({"clip_high": 0.28, "dual_clip": 3.0}, ["clip(r, 1−0.2, 1+0.28)", "not below 3·A where A < 0"]),
        (
            {"anchor": "proximal", "correction": {"weight": "token"}},
            ["min(ρ, 2)·min(r·A", "r = π/π_prox", "ρ = π_prox/π_beh"],
        ),
        ({"anchor": "interpolated"}, ["r = π/π_prox", "d/(d+1)"]),
        ({"policy": "policy_gradient"}, ["Σ A·log π"]),
        ({"policy": "cispo", "clip_low": 1.0}, ["sg(clip(r, 1−1, 1+0.2))·A·log π"]),
        ({"policy": "gspo", "mean": "segments"}, ["−(1/S) Σ_segments (1/n) Σ min(s·A", "s = (Π π/π_beh)^(1/n)"]),
        ({"mean": "fixed", "fixed_length": 99}, ["(1/(S·99)) Σ"]),
        ({"kl": 0.5, "entropy": 0.25}, ["A) − 0.5·k3(π, π_ref) + 0.25·H(π)]", "π_ref = the policy that"]),
        (
            {
                "policy": "policy_gradient",
                "correction": {"weight": "token", "cap": "inf", "mask": "token", "veto": 1e-3},
            },
            ["Σ ρ·A·log π", "only where 0.5 ≤ ρ ≤ 5", "no segment with a ρ < 0.001"],
        ),
        ({"policy": "policy_gradient", "correction": {"mask": "geometric"}}, ["0.5 ≤ (Πρ)^(1/n) ≤ 5"]),
    ],
)
def test_the_formula_names_its_parts(choices: dict[str, Any], parts: list[str]) -> None:
    formula = describe_loss(choose(**choices))
    assert all(part in formula for part in parts), formula


def half(tokens: LossTokens, settings: LossSettings) -> TokenLoss:
    """A loss of somebody's own."""
    return TokenLoss(-0.5 * tokens.advantages * tokens.logprobs * (1 - settings.clip_low))


half.entry = LossEntry(f"{__name__}:half", "½·(1−{clip_low:g})·A·log π", ("clip_low",), ratio=None)  # type: ignore[attr-defined]


def test_a_loss_of_ones_own_is_a_function() -> None:
    choice = LossSettings(policy=f"{__name__}:half", clip_low=0.5)
    assert "½·(1−0.5)·A·log π" in describe_loss(choice)
    assert load_loss(choice.policy) is half
    with pytest.raises(UsageError, match="dual_clip"):
        describe_loss(choice.model_copy(update={"dual_clip": 3.0}))


def test_every_registered_loss_loads() -> None:
    assert all(callable(load_loss(name)) for name in LOSSES)


def test_bounds_of_a_ratio_that_stays_1_are_refused() -> None:
    """Held against the policy before the batch, the first step has nothing to clip."""
    loss = choose(anchor="proximal", clip_high=0.3, correction={"weight": "token"})
    with pytest.raises(UsageError, match=r"clip_high=0.3 would have no effect under loss.anchor=proximal with one"):
        describe(TrainerSettings(loss=loss))
    several = describe(TrainerSettings(loss=loss, minibatches_per_batch=4))
    assert "π_prox = the policy before the batch" in several and several.endswith("4 optimizer steps a batch")
    assert "optimizer steps" not in describe(TrainerSettings())
