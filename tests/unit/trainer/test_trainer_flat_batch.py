"""A batch laid out at once gives, byte for byte, what one segment, one group, one token at a time gives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config.training.algorithm import AdvantageSettings
from services.policies.batching import Group
from services.policies.staleness import FutureVersionError
from services.wire.packed import unpack_logprobs, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import RewardSpan, Trajectory, VersionSpan
from tests.support.examples import examples
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.algorithms.advantages.batch import Float64Array, RewardBatch
from trainer.algorithms.advantages.compute import AdvantageComputer, Credit
from trainer.algorithms.advantages.grpo import EPSILON, group_relative
from trainer.algorithms.advantages.rewards import Batch, score
from trainer.algorithms.advantages.rloo import leave_one_out
from trainer.data.packing import micro_batch
from trainer.data.rows import Row, rows_of
from trainer.data.staleness import StalenessTally, count_only, judge
from trainer.metrics.step import outcome

VERSION = 6
rewards = st.sampled_from([-1.5, 0.0, 0.1, 0.3, 1.0, 1e6])


@st.composite
def rollouts(draw: st.DrawFn) -> list[Trajectory]:
    """Groups of two to five, of one to three segments each: turns with an environment's tokens in between, tokens of
    several versions, sessions at several temperatures, and rewards of single calls."""
    made: list[Trajectory] = []
    for ordinal in range(draw(st.integers(1, 4))):
        size = draw(st.integers(2, 5))
        for member in range(size):
            segments = []
            for _ in range(draw(st.integers(1, 3))):
                prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
                versions = draw(st.lists(st.integers(0, VERSION), max_size=6))
                if not segments and not versions:
                    versions = [VERSION]
                answer = draw(st.lists(st.integers(0, 9), min_size=len(versions), max_size=len(versions)))
                segments.append(a_segment(prompt, answer, [-0.25 * (i + 1) for i in range(len(answer))], versions))
            temperature = draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.7]))
            one = a_rollout(
                segments,
                draw(rewards),
                group=f"g{ordinal}",
                ordinal=ordinal,
                size=size,
                member=member,
                sampling=SamplingParams(max_tokens=9, temperature=temperature),
            )
            if draw(st.booleans()):
                spans = [RewardSpan(0, s.start, s.length, 0.3) for s in segments[0].version_spans[:2]]
                one = msgspec.structs.replace(one, reward_spans=spans)
            made.append(one)
    return made


def plain_rows(
    groups: Sequence[Group[Trajectory]], credits: dict[str, Credit], version: int, k: int, *, skip_idle: bool
) -> tuple[list[Row], StalenessTally]:
    """One segment at a time."""
    rows, tally = [], StalenessTally()
    for member in (member for group in groups for member in group.members if member.entry in credits):
        spans = [span for segment in member.payload.segments for span in segment.version_spans]
        last = max((span.version for span in spans), default=0)
        fresh = [span for span in spans if version - span.version <= k]
        tally.while_sampled += sum((last - span.version) * span.length for span in fresh)
        for number, segment in enumerate(member.payload.segments):
            advantages = credits[member.entry].advantages[number]
            if skip_idle and not advantages.any():
                count_only(segment.version_spans, version, k, tally)
                continue
            ages = judge(segment.version_spans, len(advantages), version, k, tally)
            if not ages.trains:
                continue
            temperatures = np.ones(len(advantages), dtype=np.float32)
            for span in segment.version_spans:
                sampling = member.payload.samplings[span.sampling]
                temperatures[span.start : span.start + span.length] = sampling.temperature or 1.0
            tokens, logprobs = unpack_tokens(segment.token_ids), unpack_logprobs(segment.logprobs)
            rows.append(Row(tokens, logprobs, ages, advantages, temperatures))
    return rows, tally


@examples(150)
@given(rollouts(), st.integers(0, 3), st.booleans(), st.sampled_from(["grpo", "rloo", "reinforce_pp"]))
def test_rows_are_those_of_one_segment_at_a_time(
    played: list[Trajectory], k: int, skip_idle: bool, estimator: str
) -> None:
    groups = grouped(played)
    credits, _ = AdvantageComputer(AdvantageSettings(estimator=estimator)).of(groups)
    found, tally = rows_of(groups, VERSION, k, credits, skip_idle=skip_idle)
    wanted, wanted_tally = plain_rows(groups, dict(credits), VERSION, k, skip_idle=skip_idle)
    assert tally == wanted_tally
    assert tally.while_generated + tally.while_queued + tally.while_trained == pytest.approx(tally.mean)
    assert len(found) == len(wanted)
    for row, plain in zip(found, wanted, strict=True):
        assert (row.token_ids.tobytes(), row.logprobs.tobytes()) == (
            plain.token_ids.tobytes(),
            plain.logprobs.tobytes(),
        )
        assert row.ages.values.tolist() == plain.ages.values.tolist()
        assert row.ages.current_until == plain.ages.current_until
        assert row.advantages.tobytes() == plain.advantages.tobytes()
        temperatures = np.ones(len(row.token_ids), dtype=np.float32) if row.temperatures is None else row.temperatures
        assert plain.temperatures is not None and temperatures.tolist() == plain.temperatures.tolist()
    again, same = rows_of(groups, VERSION, k, dict(credits), skip_idle=skip_idle)
    assert same == tally and [row.advantages.tobytes() for row in again] == [row.advantages.tobytes() for row in found]


@examples(60)
@given(rollouts(), st.integers(0, 3))
def test_rows_taken_together_are_those_joined_one_by_one(played: list[Trajectory], k: int) -> None:
    rows, _ = rows_of(grouped(played), VERSION, k)
    if not len(rows):
        return
    order = np.argsort(rows.lengths, kind="stable")[::-1]
    taken, joined = micro_batch(rows.take(order)), micro_batch([rows[int(index)] for index in order])
    for name in ("places", "behaviour", "current", "chosen", "segment", "staleness", "advantages"):
        assert getattr(taken, name).tolist() == getattr(joined, name).tolist(), name
    assert taken.row.input_ids.tolist() == joined.row.input_ids.tolist() and taken.row.runs == joined.row.runs


@examples(100)
@given(rollouts())
def test_parts_of_a_batch_have_the_advantages_of_the_whole(played: list[Trajectory]) -> None:
    groups = grouped(played)
    credits, _ = AdvantageComputer(AdvantageSettings(estimator="reinforce_pp")).of(groups)
    for first in range(len(groups)):
        part = credits.part(groups[first : first + 2])
        for entry, credit in part.items():
            assert [piece.tobytes() for piece in credit.advantages] == [
                piece.tobytes() for piece in credits[entry].advantages
            ]
        assert set(part) == {member.entry for group in groups[first : first + 2] for member in group.members}
    if len(groups) > 2:
        with pytest.raises(ValueError, match="no neighbours"):
            credits.part([groups[0], groups[2]])


def plain_group_relative(rewards: Float64Array, *, std: bool) -> Float64Array:
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    gaps: Float64Array = rewards - rewards.mean()
    return gaps / (rewards.std(ddof=1) + EPSILON) if std else gaps


def plain_leave_one_out(rewards: Float64Array) -> Float64Array:
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


@examples(200)
@given(st.lists(st.lists(rewards | st.floats(-3.0, 3.0), min_size=2, max_size=19), min_size=1, max_size=9))
def test_groups_judged_together_get_the_bytes_of_one_at_a_time(outcomes: list[list[float]]) -> None:
    flat = np.array([reward for group in outcomes for reward in group])
    number = np.repeat(np.arange(len(outcomes)), [len(group) for group in outcomes])
    everybody, nobody = np.ones(len(flat), dtype=np.bool_), np.zeros(len(flat), dtype=np.bool_)
    batch = RewardBatch(flat, flat, np.arange(len(flat)), number, everybody, nobody)
    for std in (True, False):
        found = batch.by_size(lambda rewards, std=std: group_relative(rewards, std=std))
        assert found.tobytes() == batch.by_group(lambda r, std=std: plain_group_relative(r, std=std)).tobytes()
    assert batch.by_size(leave_one_out).tobytes() == batch.by_group(plain_leave_one_out).tobytes()


@pytest.mark.parametrize("judge_group", [group_relative, leave_one_out])
def test_a_group_of_one_has_nothing_to_be_compared_with(judge_group: object) -> None:
    alone = RewardBatch(np.ones(3), np.ones(3), np.arange(3), np.array([0, 0, 1]), np.ones(3) > 0, np.ones(3) < 0)
    with pytest.raises(ValueError, match="a group of 1 has no siblings"):
        alone.by_size(judge_group)  # type: ignore[arg-type]


@examples(100)
@given(rollouts())
def test_a_trajectory_s_rewards_add_up_to_its_outcome(played: list[Trajectory]) -> None:
    batch = Batch.of(grouped(played))
    scored = score(batch, AdvantageSettings(), 0, None, None, None)
    for number, one in enumerate(batch.trajectories):
        own = scored.rewards[scored.trajectory == number]
        assert len(own) == one.sampled_tokens()
        assert float(own.sum()) == pytest.approx(one.reward, rel=1e-9, abs=1e-9)
        placed = {span.start + span.length - 1 for span in one.reward_spans}
        plain = [0.0] * len(own)
        first = one.segments[0].version_spans[0].start if one.segments[0].version_spans else 0
        for span in one.reward_spans:
            plain[span.start + span.length - 1 - first] += span.reward
        plain[-1] += one.reward - sum(plain)
        assert own.tolist() == pytest.approx(plain, rel=1e-9, abs=1e-9), placed


@examples(60)
@given(rollouts())
def test_the_batch_s_outcome_is_that_of_its_trajectories(played: list[Trajectory]) -> None:
    found = outcome(Batch.of(grouped(played)))
    assert found.trajectories == len(played)
    assert found.response_length == pytest.approx(sum(one.sampled_tokens() for one in played) / len(played))
    assert found.mixed_segments == sum(
        len({span.version for span in segment.version_spans}) > 1 for one in played for segment in one.segments
    )


def test_only_who_is_trained_is_judged() -> None:
    """A baseline of a version that cannot be is no reason to stop: it is not trained."""
    group = grouped([a_rollout([a_segment([1], [2], [-0.5], [9])], float(i), size=2, member=i) for i in range(2)])
    with pytest.raises(FutureVersionError, match="version 9"):
        rows_of(group, VERSION, 2)
    assert len(rows_of(group, VERSION, 2, {})[0]) == 0


def test_ages_of_long_runs_do_not_wrap() -> None:
    """Ages are 16 bits wide; a run of a hundred thousand steps without a bound is judged all the same."""
    long = msgspec.structs.replace(a_segment([1], [2], [-0.5], [0]), version_spans=[VersionSpan(1, 1, 0)])
    group = grouped([a_rollout([long], float(i), size=2, member=i) for i in range(2)])
    rows, tally = rows_of(group, 100_000, 200_000)
    assert tally.largest == 100_000 and rows[0].ages.values.tolist() == [-1, 32767]
