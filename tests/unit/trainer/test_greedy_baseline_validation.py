"""What ReMax and a cost ask of trajectories: a first sibling sampled greedily, the others not, and the cost itself."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from services.policies.batching import DropCause, Member
from services.run_store.stream import StreamEntry
from services.wire.sampling import SamplingParams
from services.wire.trajectory import encode_trajectory
from tests.support.trajectories import a_rollout, a_segment
from trainer.data.validation import Validator

VALIDATOR = Validator("r", vocabulary=64, longest=32, greedy_baseline=True)


def verdict(
    screen: Validator, number: int, sampling: SamplingParams, components: dict[str, float] | None = None
) -> object:
    one = a_rollout([a_segment([5], [6], [-1.0], [0])], 1.0, member=number, sampling=sampling)
    if components is not None:
        one = msgspec.structs.replace(one, reward_components=components)
    judged = screen.judge(StreamEntry("1-0", encode_trajectory(one)), 0)
    return None if isinstance(judged, Member) else judged.cause


@pytest.mark.parametrize(
    ("number", "temperature", "cause"),
    [(0, 0.0, None), (0, 1.0, DropCause.SAMPLING), (1, 1.0, None), (1, 0.0, DropCause.SAMPLING)],
)
def test_the_first_sibling_alone_is_greedy(number: int, temperature: float, cause: DropCause | None) -> None:
    assert verdict(VALIDATOR, number, SamplingParams(max_tokens=4, temperature=temperature)) == cause


def test_without_a_baseline_nobody_is_greedy() -> None:
    for number in (0, 1):
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        assert verdict(replace(VALIDATOR, greedy_baseline=False), number, greedy) == DropCause.SAMPLING


def test_a_penalty_makes_no_baseline() -> None:
    shifted = SamplingParams(max_tokens=4, temperature=0.0, presence_penalty=1.0)
    assert verdict(VALIDATOR, 0, shifted) == DropCause.SAMPLING


def test_a_cost_that_is_not_told_is_not_nothing() -> None:
    screen = Validator("r", vocabulary=64, longest=32, cost="harm")
    plain = SamplingParams(max_tokens=4)
    assert verdict(screen, 0, plain) == DropCause.NO_COST
    assert verdict(screen, 0, plain, {"harm": 0.0}) is None
