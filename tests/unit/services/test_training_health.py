"""Signs that a run cannot learn: each planted cause alone, what happens once by chance, and a run that is well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.policies.training.health import signs
from services.wire.run_metrics import StepMetrics
from tests.support.step_lines import step_metrics

WELL = replace(
    step_metrics(1),
    success=0.4,
    equal_groups=0.3,
    truncated=0.05,
    entropy=0.8,
    ratio_mean=1.01,
    effective_samples=0.97,
    grad_norm=2.0,
    logprob_gap_mean=1e-5,
)
IN_TWO: list[tuple[str, dict[str, Any]]] = [
    ("no_signal", {"equal_groups": 1.0}),
    ("truncated", {"truncated": 0.21}),
    ("entropy", {"entropy": 0.01}),
    ("ratios", {"ratio_mean": 2.5}),
    ("ratios", {"ratio_mean": 0.3}),
    ("ratios", {"effective_samples": 0.1}),
    ("gradient", {"grad_norm": 101.0}),
]
AT_ONCE: list[tuple[str, dict[str, Any]]] = [
    ("unknown_tokens", {"unknown_tokens": 3}),
    ("unrendered_tools", {"unrendered_tools": 1}),
    ("disagreement", {"logprob_gap_mean": 0.2}),
]


def seen(before: StepMetrics | None, now: StepMetrics) -> list[str]:
    return list(signs(before, now, 1.0))


@pytest.mark.parametrize(("kind", "fields"), AT_ONCE)
def test_what_no_chance_brings_about_is_named_at_the_first_step(kind: str, fields: dict[str, Any]) -> None:
    assert seen(None, replace(WELL, **fields)) == [kind]


@pytest.mark.parametrize(("kind", "fields"), IN_TWO)
def test_what_chance_may_bring_about_is_named_at_the_second_step(kind: str, fields: dict[str, Any]) -> None:
    ill = replace(WELL, **fields)
    assert seen(None, ill) == seen(WELL, ill) == seen(ill, WELL) == []
    assert seen(ill, ill) == [kind]


def test_a_run_that_is_well_has_no_sign_and_a_solved_task_neither() -> None:
    assert seen(None, WELL) == seen(WELL, WELL) == []
    solved = replace(WELL, success=0.95, equal_groups=1.0, entropy=0.001)
    assert seen(solved, solved) == []


def test_figures_that_were_not_measured_are_no_sign() -> None:
    nothing = replace(
        WELL, entropy=None, ratio_mean=None, effective_samples=None, grad_norm=None, logprob_gap_mean=None
    )
    assert seen(nothing, nothing) == []


def test_a_sign_says_its_figure_and_what_to_do() -> None:
    ill = replace(WELL, truncated=0.37)
    words = signs(ill, ill, 1.0)["truncated"]
    assert "37%" in words and "rollout.max_tokens" in words
