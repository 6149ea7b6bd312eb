"""Capture: what comes out is, token for token, what went in, and always a trajectory the trainer accepts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.capture import Capture, CaptureError
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan, check_trajectory, encode_trajectory

tokens = st.integers(min_value=0, max_value=2**31 - 1)


@dataclass
class Sampled:
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    """One a token."""
    cuts: list[bool]
    """Where an engine starts a new span although the version stays."""

    def spans(self) -> list[VersionSpan]:
        spans: list[VersionSpan] = []
        for position, (version, cut) in enumerate(zip(self.versions, self.cuts, strict=True)):
            if spans and spans[-1].version == version and not cut:
                spans[-1] = VersionSpan(spans[-1].start, spans[-1].length + 1, version)
            else:
                spans.append(VersionSpan(position, 1, version))
        return spans


@st.composite
def sampled(draw: st.DrawFn) -> Sampled:
    ids = draw(st.lists(tokens, max_size=12))
    same = st.lists
    return Sampled(
        ids,
        draw(same(st.floats(-50.0, 0.0, width=32), min_size=len(ids), max_size=len(ids))),
        sorted(draw(same(st.integers(0, 4), min_size=len(ids), max_size=len(ids)))),
        draw(same(st.booleans(), min_size=len(ids), max_size=len(ids))),
    )


appends = st.lists(st.one_of(st.lists(tokens, max_size=12), sampled()), max_size=8)


def as_trajectory(segments: list[Segment]) -> Trajectory:
    return Trajectory(
        run_id="r",
        trajectory_id="t",
        group_id="g",
        group_ordinal=0,
        group_size=1,
        member=0,
        task="sums",
        segments=segments,
        reward=0.0,
        sampling=SamplingParams(max_tokens=1),
        server_id="s0",
        opened_at=0.0,
        finished_at=0.0,
    )


def captured(parts: list[list[int] | Sampled]) -> Capture:
    capture = Capture()
    for part in parts:
        if isinstance(part, Sampled):
            capture.add_sampled(part.token_ids, part.logprobs, part.spans())
        else:
            capture.add_environment(part)
    return capture


@given(appends)
def test_any_conversation_becomes_a_segment_that_the_trainer_accepts(parts: list[list[int] | Sampled]) -> None:
    segments = captured(parts).segments()
    check_trajectory(as_trajectory(segments))
    encode_trajectory(as_trajectory(segments))
    assert len(segments) <= 1


@given(appends)
def test_every_token_comes_out_once_with_its_own_mask_logprob_and_version(parts: list[list[int] | Sampled]) -> None:
    expected: list[tuple[int, int, float, int | None]] = []
    for part in parts:
        if isinstance(part, Sampled):
            rows = zip(part.token_ids, part.logprobs, part.versions, strict=True)
            expected += [(token, 1, logprob, version) for token, logprob, version in rows]
        else:
            expected += [(token, 0, 0.0, None) for token in part]
    capture = captured(parts)
    segments = capture.segments()
    assert capture.context == [row[0] for row in expected]
    assert capture.sampled == sum(row[1] for row in expected)
    assert bool(segments) == bool(expected)
    if not segments:
        return
    version_at = {
        position: span.version
        for span in segments[0].version_spans
        for position in range(span.start, span.start + span.length)
    }
    found = list(
        zip(
            unpack_tokens(segments[0].token_ids).tolist(),
            unpack_mask(segments[0].loss_mask).tolist(),
            unpack_logprobs(segments[0].logprobs).tolist(),
            [version_at.get(position) for position in range(len(expected))],
            strict=True,
        )
    )
    assert found == expected


@given(appends)
def test_neighbouring_spans_of_one_version_are_one_span(parts: list[list[int] | Sampled]) -> None:
    for segment in captured(parts).segments():
        spans = segment.version_spans
        for first, second in itertools.pairwise(spans):
            assert first.start + first.length < second.start or first.version != second.version


def test_a_commit_inside_an_answer_shows_as_two_spans_of_one_segment() -> None:
    capture = Capture()
    capture.add_environment([5, 6, 7])
    capture.add_sampled([8, 9, 10], [-0.5, -0.25, -1.0], [VersionSpan(0, 2, 4), VersionSpan(2, 1, 5)])
    capture.add_environment([11])
    capture.add_sampled([12], [-2.0], [VersionSpan(0, 1, 5)])
    (segment,) = capture.segments()
    assert segment.version_spans == [VersionSpan(3, 2, 4), VersionSpan(5, 1, 5), VersionSpan(7, 1, 5)]
    assert segment.break_reason is None


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "spans", "says"),
    [
        ([1, 2], [-1.0], [VersionSpan(0, 2, 0)], "2 tokens and 1 logprobs"),
        ([1, 2], [-1.0, float("nan")], [VersionSpan(0, 2, 0)], "not finite"),
        ([1, 2], [-1.0, float("-inf")], [VersionSpan(0, 2, 0)], "not finite"),
        ([1, 2], [-1.0, -1.0], [VersionSpan(0, 1, 0)], "cover 1 of 2"),
        ([1, 2], [-1.0, -1.0], [VersionSpan(0, 1, 0), VersionSpan(0, 1, 1)], "at 0"),
        ([1, 2], [-1.0, -1.0], [VersionSpan(1, 1, 0)], "at 1"),
        ([], [], [VersionSpan(0, 0, 0)], "length 0"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused_whole(
    token_ids: list[int], logprobs: list[float], spans: list[VersionSpan], says: str
) -> None:
    capture = Capture()
    capture.add_environment([3])
    with pytest.raises(CaptureError, match=says):
        capture.add_sampled(token_ids, logprobs, spans)
    assert capture.context == [3]
    check_trajectory(as_trajectory(capture.segments()))
