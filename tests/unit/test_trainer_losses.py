"""The loss, piece by piece, against plain float64 arithmetic written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.settings import LossSettings
from services.wire.errors import UsageError
from trainer.advantages import grpo
from trainer.corrections import truncated_is
from trainer.formula import describe_loss
from trainer.losses.policy_gradient import policy_gradient
from trainer.losses.ppo_clip import ppo_clip
from trainer.objective import Objective, masked_sum

logprob = st.floats(-12.0, -1e-3)
advantage = st.floats(-4.0, 4.0)
tokens = st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=12)


def columns(rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor([list(column)], dtype=torch.float64) for column in zip(*rows, strict=True)]


def clipped_term(now: float, anchor: float, worth: float, low: float, high: float) -> tuple[float, float]:
    """Loss and its derivative by the current logprob, by hand."""
    ratio = math.exp(now - anchor)
    bounded = min(max(ratio, 1 - low), 1 + high)
    free, clipped = ratio * worth, bounded * worth
    return (-free, -free) if free <= clipped else (-clipped, 0.0)


@settings(max_examples=200, deadline=None)
@given(tokens, st.floats(0.05, 0.5), st.floats(0.05, 1.0))
def test_ppo_clip_and_its_gradient(rows: list[tuple[float, float, float]], low: float, high: float) -> None:
    now, anchor, worth = columns(rows)
    now.requires_grad_()
    loss, bound = ppo_clip(now, anchor, worth, low, high)
    loss.sum().backward()
    expected = [clipped_term(*row, low, high) for row in rows]
    assert loss[0].tolist() == pytest.approx([value for value, _ in expected], rel=1e-9)
    assert now.grad is not None
    for ours, (_, theirs), (current, old, _) in zip(now.grad[0].tolist(), expected, rows, strict=True):
        ratio = math.exp(current - old)
        if min(abs(ratio - 1 + low), abs(ratio - 1 - high)) > 1e-9:  # At the corner either derivative is right.
            assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    assert bool((now.grad[bound] == 0).all())


def test_ppo_clip_survives_ratios_beyond_float32() -> None:
    now = torch.tensor([[0.0, 0.0]], requires_grad=True)
    loss, _ = ppo_clip(now, torch.tensor([[-200.0, -200.0]]), torch.tensor([[1.0, -1.0]]), 0.2, 0.2)
    loss.sum().backward()
    assert now.grad is not None and bool(torch.isfinite(now.grad).all())


@given(tokens)
def test_policy_gradient(rows: list[tuple[float, float, float]]) -> None:
    now, _, worth = columns(rows)
    assert policy_gradient(now, worth)[0].tolist() == pytest.approx([-a * lp for lp, _, a in rows])


@given(tokens, st.floats(0.5, 5.0))
def test_truncated_importance_weights(rows: list[tuple[float, float, float]], cap: float) -> None:
    before, behaviour, _ = columns(rows)
    expected = [min(math.exp(b - beh), cap) for b, beh, _ in rows]
    assert truncated_is(before, behaviour, cap)[0].tolist() == pytest.approx(expected)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_grpo_advantages(rewards: list[float]) -> None:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    expected = [(r - mean) / (deviation + 1e-4) for r in rewards]
    assert grpo(rewards) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_equal_rewards_give_exactly_no_advantage() -> None:
    assert grpo([0.1] * 7) == [0.0] * 7
    with pytest.raises(ValueError, match="no siblings"):
        grpo([1.0])


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({}, lambda now, beh, prox, a: clipped_term(now, beh, a, 0.2, 0.2)[0]),
        ({"clip_high": 0.28}, lambda now, beh, prox, a: clipped_term(now, beh, a, 0.2, 0.28)[0]),
        ({"anchor": "proximal"}, lambda now, beh, prox, a: clipped_term(now, prox, a, 0.2, 0.2)[0]),
        (
            {"anchor": "proximal", "correction": "truncated_is", "truncated_is_cap": 1.5},
            lambda now, beh, prox, a: min(math.exp(prox - beh), 1.5) * clipped_term(now, prox, a, 0.2, 0.2)[0],
        ),
        ({"policy": "policy_gradient"}, lambda now, beh, prox, a: -a * now),
        (
            {"policy": "policy_gradient", "correction": "truncated_is"},
            lambda now, beh, prox, a: min(math.exp(prox - beh), 2.0) * -a * now,
        ),
    ],
)
def test_the_objective_computes_what_its_formula_says(settings_: dict[str, object], expected: object) -> None:
    generator = torch.Generator().manual_seed(3)
    now, behaviour, before = (-4 * torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    worth = torch.randn(3, 1, generator=generator, dtype=torch.float64)
    objective = Objective(LossSettings(**settings_))
    loss = objective(now, behaviour, before, worth).loss
    for row in range(3):
        for column in range(5):
            parts = (t[row, column].item() for t in (now, behaviour, before))
            assert loss[row, column].item() == pytest.approx(expected(*parts, worth[row, 0].item()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings_", "complaint"),
    [
        ({"correction": "truncated_is"}, "correct twice"),
        ({"policy": "policy_gradient", "clip_low": 0.1}, "clip_low=0.1 would have no effect"),
        ({"policy": "policy_gradient", "clip_high": 0.3}, "clip_high=0.3 would have no effect"),
        ({"policy": "policy_gradient", "anchor": "proximal"}, "anchor=proximal would have no effect"),
        ({"truncated_is_cap": 3.0}, "truncated_is_cap=3.0 would have no effect"),
    ],
)
def test_choices_without_effect_are_refused(settings_: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe_loss(LossSettings(**settings_))


def test_the_formula_names_its_parts() -> None:
    assert "clip(r, 1−0.2, 1+0.28)" in describe_loss(LossSettings(clip_high=0.28))
    assert "r = π/π_beh" in describe_loss(LossSettings())
    decoupled = describe_loss(LossSettings(anchor="proximal", correction="truncated_is"))
    assert "min(π_prox/π_beh, 2)" in decoupled and "r = π/π_prox" in decoupled
    assert "A·log π" in describe_loss(LossSettings(policy="policy_gradient"))


def test_masked_sum_ignores_infinities_outside_the_mask() -> None:
    values = torch.tensor([1.0, math.inf, 2.0])
    assert masked_sum(values, torch.tensor([True, False, True])).item() == 3.0
