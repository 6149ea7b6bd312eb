"""From groups to tensors: which tokens enter the loss, under which staleness, at which place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.staleness import FutureVersionError
from services.wire.packed import unpack_logprobs, unpack_tokens
from services.wire.trajectory import VersionSpan
from tests.support.trajectories import a_rollout, a_segment, group_of, grouped, random_trajectories
from trainer.algorithms.losses.tokens import BatchSize
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.data.staleness import NOT_SAMPLED, OVER_K, StalenessTally, judge


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=6), st.integers(0, 4), st.integers(9, 12))
def test_the_window_agrees_with_one_token_at_a_time(runs: list[tuple[int, int]], k: int, version: int) -> None:
    """`runs`: (length, version) of sampled runs, one unsampled token before each."""
    spans, position, expected = [], 0, []
    for length, sampled_by in runs:
        position += 1
        spans.append(VersionSpan(position, length, sampled_by))
        expected += [NOT_SAMPLED] + [version - sampled_by if version - sampled_by <= k else OVER_K] * length
        position += length
    tally = StalenessTally()
    ages = judge(spans, position, version, k, tally)
    assert ages.values.tolist() == expected
    fresh = [age for age in expected if age >= 0]
    assert (tally.fresh, tally.masked) == (len(fresh), expected.count(OVER_K))
    assert tally.largest == max(fresh, default=0) <= k
    assert tally.mean == pytest.approx(np.mean(fresh) if fresh else 0.0)
    current = [age == 0 and i < ages.current_until for i, age in enumerate(expected)]
    first_old = next((i for i, age in enumerate(expected) if age > 0 or age == OVER_K), len(expected))
    assert current == [age == 0 and i < first_old for i, age in enumerate(expected)]


def test_a_token_from_the_future_is_refused() -> None:
    with pytest.raises(FutureVersionError):
        judge([VersionSpan(1, 1, 6)], 2, policy_version=5, k=2, tally=StalenessTally())


def test_columns_carry_the_tokens_they_belong_to() -> None:
    """Two turns: the environment's tokens between them are context; a stale span is context too."""
    turns = a_segment([9, 8], [5, 6], [-0.5, -0.6], [7, 7])
    whole = a_segment([4, 4, 4], [1, 2, 3, 5], [-0.1, -0.2, -0.3, -0.4], [3, 6, 6, 7])
    group = group_of([a_rollout([turns, whole], 1.0, size=2, member=0), a_rollout([turns], 0.0, size=2, member=1)])
    rows, tally = rows_of([group], policy_version=7, k=2)
    packed = pack(rows, tally, budget=64)
    assert packed.size == BatchSize(tokens=2 + 3 + 2, segments=3, right=2 + 3) and tally.masked == 1
    assert dict(tally.histogram) == {0: 5, 1: 2}
    (micro,) = packed.micro_batches
    assert micro.row.input_ids.tolist() == [[9, 8, 5, 6, 9, 8, 5, 6, 4, 4, 4, 1, 2, 3, 5]]
    assert micro.row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]
    assert (micro.row.starts.tolist(), micro.row.runs, micro.segments) == ([0, 4, 8, 15], ((4, 2), (7, 1)), 3)
    assert micro.places.tolist() == [2, 3, 6, 7, 11, 12, 13, 14]
    assert micro.behaviour.tolist() == pytest.approx([-0.5, -0.6, -0.5, -0.6, -0.1, -0.2, -0.3, -0.4])
    assert micro.current.tolist() == [True] * 4 + [False] * 4
    assert micro.chosen.tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert micro.segment.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert micro.staleness.tolist() == [0, 0, 0, 0, 1, 1, 0]
    assert micro.advantages.tolist() == pytest.approx([0.707] * 2 + [-0.707] * 2 + [0.707] * 3, abs=1e-3)
    assert micro.temperature is None


@given(st.integers(0, 1000), st.integers(1, 99))
def test_every_training_token_appears_exactly_once(seed: int, budget: int) -> None:
    trajectories = random_trajectories(seed, groups=3, size=3, version=1)
    groups = grouped(trajectories)
    rows, tally = rows_of(groups, policy_version=2, k=1)
    packed = pack(rows, tally, budget)
    wanted = sorted(
        (int(token), round(float(logprob), 5))
        for group in groups
        if len({member.payload.reward for member in group.members}) > 1
        for member in group.members
        for segment in member.payload.segments
        for token, logprob in zip(unpack_tokens(segment.token_ids), unpack_logprobs(segment.logprobs), strict=True)
        if logprob != 0.0
    )
    found = sorted(
        (int(token), round(float(logprob), 5))
        for micro in packed.micro_batches
        for token, logprob in zip(
            micro.row.input_ids[0, micro.places[micro.chosen]], micro.behaviour[micro.chosen], strict=True
        )
    )
    assert found == wanted
    assert packed.size.tokens == sum(trajectory.sampled_tokens() for trajectory in trajectories)
    assert all(micro.row.input_ids.shape[1] <= budget or micro.segments == 1 for micro in packed.micro_batches)


def test_a_row_that_begins_with_a_sampled_token_is_refused() -> None:
    group = group_of(
        [a_rollout([a_segment([], [5, 6], [-0.5, -0.6], [7, 7])], float(i), size=2, member=i) for i in range(2)]
    )
    rows, tally = rows_of([group], policy_version=7, k=2)
    with pytest.raises(ValueError, match="begins with a sampled token"):
        pack(rows, tally, budget=64)
