"""Corrections against their formulas, and the whole objective against all of its parts put together by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.config.training.algorithm import CorrectionSettings, LossSettings
from tests.support.examples import examples
from trainer.algorithms.losses.correction import correction
from trainer.algorithms.losses.objective import Objective, TokenTerms
from trainer.algorithms.losses.tokens import BatchSize, LossTokens

logprob = st.floats(-8.0, -1e-3)
rows = st.lists(st.tuples(logprob, logprob, st.integers(0, 2)), min_size=1, max_size=12)
LEVELS = ("token", "sequence", "geometric")


def tokens_of(rows: list[tuple[float, float, int]]) -> LossTokens:
    proximal, behaviour = (torch.tensor([row[place] for row in rows], dtype=torch.float64) for place in (0, 1))
    segment = torch.tensor([row[2] for row in rows])
    return LossTokens(proximal, proximal, behaviour, proximal, torch.ones_like(proximal), segment, 3)


def ratios(rows: list[tuple[float, float, int]], level: str) -> list[float]:
    found = []
    for proximal, behaviour, segment in rows:
        gaps = [p - b for p, b, s in rows if s == segment]
        log_ratio = {
            "token": proximal - behaviour,
            "sequence": math.fsum(gaps),
            "geometric": math.fsum(gaps) / len(gaps),
        }[level]
        found.append(math.exp(min(log_ratio, 20.0)))
    return found


@pytest.mark.parametrize("level", LEVELS)
@examples(100)
@given(rows=rows, cap=st.floats(0.5, 5.0))
def test_weights_are_truncated_ratios(level: str, rows: list[tuple[float, float, int]], cap: float) -> None:
    weight, kept = correction(tokens_of(rows), CorrectionSettings(weight=level, cap=cap))
    assert kept is None and weight is not None
    assert weight.tolist() == pytest.approx([min(ratio, cap) for ratio in ratios(rows, level)], rel=1e-9)
    unbounded, _ = correction(tokens_of(rows), CorrectionSettings(weight=level, cap=math.inf))
    assert unbounded is not None and unbounded.tolist() == pytest.approx(ratios(rows, level), rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@examples(100)
@given(rows=rows, low=st.floats(0.1, 1.0), high=st.floats(1.0, 5.0))
def test_masks_leave_out_what_lies_outside(
    level: str, rows: list[tuple[float, float, int]], low: float, high: float
) -> None:
    weight, kept = correction(tokens_of(rows), CorrectionSettings(mask=level, mask_low=low, mask_high=high))
    assert weight is None and kept is not None
    for ratio, stays in zip(ratios(rows, level), kept.tolist(), strict=True):
        if min(abs(ratio - low), abs(ratio - high)) > 1e-9:
            assert stays == (low <= ratio <= high)


@examples(100)
@given(rows, st.floats(1e-4, 0.5))
def test_a_veto_takes_the_whole_segment(rows: list[tuple[float, float, int]], least: float) -> None:
    _, kept = correction(tokens_of(rows), CorrectionSettings(veto=least))
    assert kept is not None
    bad = {row[2] for row, ratio in zip(rows, ratios(rows, "token"), strict=True) if ratio < least}
    assert kept.tolist() == [row[2] not in bad for row in rows]


def test_what_is_no_ratio_is_left_out() -> None:
    # The policy and the engine both say that what was sampled could not be sampled.
    broken = tokens_of([(-1.0, -1.0, 0), (-math.inf, -math.inf, 1), (-2.0, -2.0, 1)])
    for choice in (CorrectionSettings(mask="token"), CorrectionSettings(veto=1e-4)):
        _, kept = correction(broken, choice)
        assert kept is not None
        assert kept.tolist()[:2] == [True, False]


def some_terms(seed: int = 3) -> TokenTerms:
    generator = torch.Generator().manual_seed(seed)
    now, behaviour, before, reference = (
        -4 * torch.rand(10, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    return TokenTerms(
        logprobs=now.requires_grad_(),
        behaviour=behaviour,
        proximal=before,
        advantages=torch.randn(10, generator=generator, dtype=torch.float64),
        staleness=torch.tensor([0.0, 0, 1, 1, 2, 2, 3, 3, 4, 4], dtype=torch.float64),
        segment=torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2]),
        segments=3,
        reference=reference,
        entropy=torch.rand(10, generator=generator, dtype=torch.float64),
    )


def surrogate(now: float, anchor: float, worth: float) -> float:
    ratio = math.exp(now - anchor)
    return -min(ratio * worth, min(max(ratio, 0.8), 1.2) * worth)


@pytest.mark.parametrize(
    ("anchor", "weight"),
    [("behaviour", "none"), ("proximal", "token"), ("proximal", "none"), ("interpolated", "token")],
)
def test_the_objective_is_all_its_parts(anchor: str, weight: str) -> None:
    choice = LossSettings(
        anchor=anchor,
        kl=0.1,
        entropy=0.05,
        correction=CorrectionSettings(weight=weight, mask="token", mask_low=0.3, mask_high=4.0),
    )
    terms = some_terms()
    found = Objective(choice)(terms)
    assert terms.proximal is not None and terms.reference is not None and terms.entropy is not None
    for place in range(10):
        now, behaviour, before, worth, age, reference, entropy = (
            float(column.detach()[place])
            for column in (
                *(terms.logprobs, terms.behaviour, terms.proximal, terms.advantages),
                *(terms.staleness, terms.reference, terms.entropy),
            )
        )
        if anchor == "interpolated":
            before = behaviour + age / (age + 1) * (now - behaviour)
        ratio = math.exp(before - behaviour)
        expected = surrogate(now, behaviour if anchor == "behaviour" else before, worth)
        if weight == "token":
            expected *= min(ratio, 2.0)
        if not 0.3 <= ratio <= 4.0:
            expected = 0.0
        expected += 0.1 * (math.exp(reference - now) - 1 + now - reference) - 0.05 * entropy
        assert found.loss[place].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_what_a_mask_leaves_out_may_be_anything() -> None:
    terms = some_terms()
    behaviour = terms.behaviour.clone()
    behaviour[4] = -math.inf
    plain = replace(terms, behaviour=behaviour, reference=None, entropy=None)
    found = Objective(LossSettings(policy="policy_gradient", correction=CorrectionSettings(mask="token")))(plain)
    assert found.kept is not None and not bool(found.kept[4])
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    gradient = terms.logprobs.grad
    assert gradient is not None and gradient[4] == 0.0 and bool(torch.isfinite(gradient).all())


def test_the_three_means() -> None:
    loss, segment = torch.arange(10.0), some_terms().segment
    size = BatchSize(tokens=40, segments=8)
    sums = [0.0 + 1 + 2, 3.0 + 4 + 5 + 6, 7.0 + 8 + 9]
    expected = {
        "tokens": 45 / 40,
        "segments": (sums[0] / 3 + sums[1] / 4 + sums[2] / 3) / 8,
        "fixed": 45 / (8 * 100),
    }
    for mean, value in expected.items():
        choice = LossSettings(mean=mean, fixed_length=100 if mean == "fixed" else 1024)
        assert Objective(choice).mean(loss, segment, 3, size).item() == pytest.approx(value)
