"""Every policy loss against its published formula, in float64 arithmetic written out token by token, gradients included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from services.config.training.algorithm import LossSettings
from tests.support.examples import examples
from trainer.algorithms.divergence import Estimator, divergence
from trainer.algorithms.losses.objective import interpolated
from trainer.algorithms.losses.registry import load_loss
from trainer.algorithms.losses.tokens import LossTokens, TokenLoss


@dataclass(frozen=True)
class Token:
    now: float
    anchor: float
    worth: float
    segment: int


logprob = st.floats(-12.0, -1e-3)
some_tokens = st.lists(
    st.builds(Token, logprob, logprob, st.floats(-4.0, 4.0), st.integers(0, 2)), min_size=1, max_size=12
)
bounds = st.tuples(st.floats(0.05, 0.9), st.floats(0.05, 2.0))
Oracle = Callable[[Sequence[Token], LossSettings], list[float]]


def as_tokens(tokens: Sequence[Token], now: torch.Tensor) -> LossTokens:
    anchor, worth = (
        torch.tensor(column, dtype=torch.float64)
        for column in zip(*((token.anchor, token.worth) for token in tokens), strict=True)
    )
    segment = torch.tensor([token.segment for token in tokens])
    return LossTokens(now, anchor, anchor, anchor, worth, segment, 3)


def judged(name: str, tokens: Sequence[Token], choice: LossSettings) -> tuple[TokenLoss, list[float]]:
    """The loss, and the gradient of its sum by each current logprob."""
    now = torch.tensor([token.now for token in tokens], dtype=torch.float64, requires_grad=True)
    found = load_loss(name)(as_tokens(tokens, now), choice)
    found.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    return found, now.grad.tolist()


def clip(ratio: float, choice: LossSettings) -> float:
    return min(max(ratio, 1 - choice.clip_low), 1 + choice.clip_high)


def by_ppo(tokens: Sequence[Token], choice: LossSettings) -> list[float]:
    losses = []
    for token in tokens:
        ratio = math.exp(token.now - token.anchor)
        gain = min(ratio * token.worth, clip(ratio, choice) * token.worth)
        if choice.dual_clip is not None and token.worth < 0:
            gain = max(gain, choice.dual_clip * token.worth)
        losses.append(-gain)
    return losses


def by_gspo(tokens: Sequence[Token], choice: LossSettings) -> list[float]:
    ratio = {}
    for name in {token.segment for token in tokens}:
        gaps = [token.now - token.anchor for token in tokens if token.segment == name]
        ratio[name] = math.exp(math.fsum(gaps) / len(gaps))
    return [
        -min(ratio[t.segment] * t.worth, clip(ratio[t.segment], choice) * t.worth)  #
        for t in tokens
    ]


def by_policy_gradient(tokens: Sequence[Token], choice: LossSettings) -> list[float]:
    del choice
    return [-token.worth * token.now for token in tokens]


ORACLES: dict[str, Oracle] = {"ppo_clip": by_ppo, "gspo": by_gspo, "policy_gradient": by_policy_gradient}


def numerically(oracle: Oracle, tokens: Sequence[Token], choice: LossSettings) -> list[float]:
    """Central differences of the summed loss by each current logprob."""
    step, slopes = 1e-5, []
    for place, token in enumerate(tokens):
        sums = []
        for sign in (1, -1):
            moved = Token(token.now + sign * step, token.anchor, token.worth, token.segment)
            sums.append(math.fsum(oracle([*tokens[:place], moved, *tokens[place + 1 :]], choice)))
        slopes.append((sums[0] - sums[1]) / (2 * step))
    return slopes


def at_a_corner(tokens: Sequence[Token], choice: LossSettings) -> bool:
    """Whether a ratio, of a token or of a segment, lies so near a bound that either derivative is right."""
    ratios = [math.exp(token.now - token.anchor) for token in tokens]
    for name in {token.segment for token in tokens}:
        gaps = [token.now - token.anchor for token in tokens if token.segment == name]
        ratios.append(math.exp(math.fsum(gaps) / len(gaps)))
    corners = [1 - choice.clip_low, 1 + choice.clip_high, *([choice.dual_clip] if choice.dual_clip else [])]
    return any(abs(ratio - corner) < 1e-3 for ratio in ratios for corner in corners)


@pytest.mark.parametrize("name", ORACLES)
@examples(200)
@given(tokens=some_tokens, bounds=bounds, dual=st.one_of(st.none(), st.floats(1.5, 4.0)))
def test_a_loss_is_its_published_formula(
    name: str, tokens: list[Token], bounds: tuple[float, float], dual: float | None
) -> None:
    choice = LossSettings(clip_low=bounds[0], clip_high=bounds[1], dual_clip=dual)
    found, slopes = judged(name, tokens, choice)
    assert found.loss.tolist() == pytest.approx(ORACLES[name](tokens, choice), rel=1e-9, abs=1e-12)
    assume(not at_a_corner(tokens, choice))
    assert slopes == pytest.approx(numerically(ORACLES[name], tokens, choice), rel=1e-5, abs=1e-5)


@examples(200)
@given(some_tokens, bounds, st.one_of(st.none(), st.floats(1.5, 4.0)))
def test_where_a_bound_of_ppo_binds_there_is_no_gradient(
    tokens: list[Token], bounds: tuple[float, float], dual: float | None
) -> None:
    choice = LossSettings(clip_low=bounds[0], clip_high=bounds[1], dual_clip=dual)
    found, slopes = judged("ppo_clip", tokens, choice)
    assert found.clipped is not None
    assert all(slope == 0.0 for slope, bound in zip(slopes, found.clipped.tolist(), strict=True) if bound)


@examples(200)
@given(some_tokens, bounds)
def test_cispo_bounds_the_ratio_and_loses_no_gradient(tokens: list[Token], bounds: tuple[float, float]) -> None:
    choice = LossSettings(policy="cispo", clip_low=bounds[0], clip_high=bounds[1])
    found, slopes = judged("cispo", tokens, choice)
    weights = [clip(math.exp(token.now - token.anchor), choice) for token in tokens]
    expected = [-weight * token.worth for weight, token in zip(weights, tokens, strict=True)]
    # The weight has no gradient: that of the loss is it, times the advantage.
    assert slopes == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.loss.tolist() == pytest.approx(
        [slope * token.now for slope, token in zip(expected, tokens, strict=True)], rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "policy_gradient"])
@pytest.mark.parametrize("worth", [1.0, -1.0])
def test_losses_survive_what_float32_cannot_hold(name: str, worth: float) -> None:
    now = torch.tensor([0.0, -200.0, -1.0], requires_grad=True)
    anchor = torch.tensor([-200.0, 0.0, -1.0])
    tokens = LossTokens(now, anchor, anchor, anchor, torch.full((3,), worth), torch.tensor([0, 1, 2]), 3)
    load_loss(name)(tokens, LossSettings()).loss.sum().backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None and bool(torch.isfinite(now.grad).all())


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo", "policy_gradient"])
def test_no_token_and_one_token_are_batches_too(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    tokens = LossTokens(empty, nothing, nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64), 1)
    loss = load_loss(name)(tokens, LossSettings()).loss.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    # At the anchor every ratio is 1, at whatever bound: the gradient is the advantage's.
    _, slopes = judged(name, [Token(-1.0, -1.0, 2.0, 0)], LossSettings())
    assert slopes == pytest.approx([-2.0])


@given(logprob, logprob)
def test_estimates_of_the_divergence(now: float, reference: float) -> None:
    delta = now - reference
    expected: dict[Estimator, float] = {
        "k1": delta,
        "k2": delta * delta / 2,
        "k3": math.exp(-delta) - 1 + delta,
    }
    for estimator, value in expected.items():
        found = divergence(
            torch.tensor(now, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), estimator
        )
        assert found.item() == pytest.approx(value, rel=1e-9, abs=1e-12)


def test_the_estimates_are_those_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(1)
    policy, reference = (torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k3"):
        assert float((policy.exp() * divergence(policy, reference, estimator)).sum()) == pytest.approx(exact)


@given(logprob, logprob, st.integers(0, 20))
def test_the_interpolated_policy_lies_between(now: float, behaviour: float, staleness: int) -> None:
    share = staleness / (staleness + 1)
    columns = [torch.tensor(value, dtype=torch.float64) for value in (now, behaviour, float(staleness))]
    found = interpolated(columns[0], columns[1], columns[2])
    assert found.item() == pytest.approx((1 - share) * behaviour + share * now, rel=1e-9)
