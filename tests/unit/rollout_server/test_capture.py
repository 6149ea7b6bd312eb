"""Capture: what comes out is, token for token, what went in, once, and always a trajectory the trainer accepts."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.sessions.capture import Capture, CaptureError, Node, path
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan, check_trajectory, encode_trajectory

tokens = st.integers(min_value=0, max_value=2**31 - 1)
PLAIN = SamplingParams(max_tokens=1)
WARM = SamplingParams(max_tokens=1, temperature=0.5)


@dataclass(frozen=True)
class Sampled:
    """An answer: what stands before it, what was sampled, and one logprob, version and span cut a token."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    cuts: list[bool]
    sampling: SamplingParams

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
        draw(st.lists(tokens, max_size=12)),
        ids,
        draw(same(st.floats(-50.0, 0.0, width=32), min_size=len(ids), max_size=len(ids))),
        sorted(draw(same(st.integers(0, 4), min_size=len(ids), max_size=len(ids)))),
        draw(same(st.booleans(), min_size=len(ids), max_size=len(ids))),
        draw(st.sampled_from([PLAIN, WARM])),
    )


def as_trajectory(segments: list[Segment], samplings: list[SamplingParams]) -> Trajectory:
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
        samplings=samplings,
        server_id="s0",
        opened_at=0.0,
        finished_at=0.0,
    )


def record(capture: Capture, parent: Node | None, part: Sampled) -> Node:
    return capture.record(parent, part.prompt, part.token_ids, part.logprobs, part.spans(), part.sampling)


Row = tuple[int, int, float, int | None, SamplingParams | None]


def rows(segment: Segment, samplings: list[SamplingParams]) -> list[Row]:
    """(token, mask, logprob, version, sampling) of every position."""
    at = {position: span for span in segment.version_spans for position in range(span.start, span.start + span.length)}
    columns = zip(
        unpack_tokens(segment.token_ids).tolist(),
        unpack_mask(segment.loss_mask).tolist(),
        unpack_logprobs(segment.logprobs).tolist(),
        strict=True,
    )
    return [
        (token, mask, logprob, at[i].version if i in at else None, samplings[at[i].sampling] if i in at else None)
        for i, (token, mask, logprob) in enumerate(columns)
    ]


@given(st.lists(sampled(), max_size=8))
def test_a_conversation_that_only_grows_is_one_segment_with_every_token_as_it_was(parts: list[Sampled]) -> None:
    capture = Capture()
    expected: list[Row] = []
    for part in parts:
        record(capture, capture.tip, part)
        expected += [(token, 0, 0.0, None, None) for token in part.prompt]
        sampled = zip(part.token_ids, part.logprobs, part.versions, strict=True)
        expected += [(token, 1, logprob, version, part.sampling) for token, logprob, version in sampled]
    segments = capture.segments()
    check_trajectory(as_trajectory(segments, capture.samplings))
    encode_trajectory(as_trajectory(segments, capture.samplings))
    assert capture.context == [row[0] for row in expected]
    assert capture.sampled == sum(row[1] for row in expected)
    assert len(segments) == (1 if capture.sampled else 0)
    if segments:
        assert rows(segments[0], capture.samplings) == expected
        assert segments[0].break_reason is None


trees = st.lists(st.tuples(st.integers(0, 7), sampled()), min_size=1, max_size=8)
"""Answers, each with the number of the earlier one that it extends (its own number or more: a root)."""


def grow(branches: list[tuple[int, Sampled]], order: list[int]) -> tuple[Capture, dict[int, Node]]:
    """Record answers in `order`, each as soon as the one that it extends is there."""
    capture, nodes = Capture(), {}
    for samplings in (PLAIN, WARM):  # their numbering may follow the order; here it must not
        capture._sampling_index(samplings)
    waiting = list(order)
    while waiting:
        number = next(i for i in waiting if branches[i][0] >= i or branches[i][0] in nodes)
        waiting.remove(number)
        parent = nodes.get(branches[number][0]) if branches[number][0] < number else None
        nodes[number] = record(capture, parent, branches[number][1])
    return capture, nodes


@given(trees)
def test_in_a_tree_every_sampled_token_is_trained_in_exactly_one_segment(branches: list[tuple[int, Sampled]]) -> None:
    capture, nodes = grow(branches, list(range(len(branches))))
    layout = capture.layout()
    check_trajectory(as_trajectory(layout.segments, capture.samplings))
    laid = [rows(segment, capture.samplings) for segment in layout.segments]
    assert sum(mask for segment in laid for _, mask, *_ in segment) == capture.sampled
    for number, node in nodes.items():
        part = branches[number][1]
        if not part.token_ids:
            continue
        segment, start = layout.positions[node]
        sampled = zip(part.token_ids, part.logprobs, part.versions, strict=True)
        expected = [(token, 1, logprob, version, part.sampling) for token, logprob, version in sampled]
        assert laid[segment][start : start + len(expected)] == expected
        # ... and what stands before it is what the engine saw.
        before = [token for token, *_ in laid[segment][:start]]
        assert before + part.token_ids == path(node)


@given(trees, st.randoms(use_true_random=False))
def test_the_order_in_which_branches_come_changes_nothing(
    branches: list[tuple[int, Sampled]], chance: random.Random
) -> None:
    order = list(range(len(branches)))
    first, _ = grow(branches, order)
    chance.shuffle(order)
    second, _ = grow(branches, order)
    assert first.segments() == second.segments()


@given(trees, st.data())
def test_a_prompt_finds_the_longest_path_that_it_extends(
    branches: list[tuple[int, Sampled]], data: st.DataObject
) -> None:
    capture, nodes = grow(branches, list(range(len(branches))))
    paths = [path(node) for node in nodes.values()]
    prompt = data.draw(st.sampled_from(paths)) + data.draw(st.lists(tokens, max_size=3))
    prompt = prompt[: data.draw(st.integers(0, len(prompt)))]
    fitting = [each for each in paths if prompt[: len(each)] == each]
    found = capture.find(prompt)
    assert (found is None) == (not fitting)
    if found is not None:
        assert path(found) == max(fitting, key=len)


def test_neighbouring_spans_of_one_version_and_sampling_are_one_span() -> None:
    capture = Capture()
    capture.record(None, [5], [8, 9], [-0.5, -0.25], [VersionSpan(0, 1, 4), VersionSpan(1, 1, 4)], PLAIN)
    capture.record(capture.tip, [], [10], [-1.0], [VersionSpan(0, 1, 4)], PLAIN)
    capture.record(capture.tip, [], [11], [-1.0], [VersionSpan(0, 1, 4)], WARM)
    (segment,) = capture.segments()
    assert segment.version_spans == [VersionSpan(1, 3, 4, 0), VersionSpan(4, 1, 4, 1)]


def test_a_commit_inside_an_answer_shows_as_two_spans_of_one_segment() -> None:
    capture = Capture()
    versions = [VersionSpan(0, 2, 4), VersionSpan(2, 1, 5)]
    capture.record(None, [5, 6, 7], [8, 9, 10], [-0.5, -0.25, -1.0], versions, PLAIN)
    capture.record(capture.tip, [11], [12], [-2.0], [VersionSpan(0, 1, 5)], PLAIN)
    (segment,) = capture.segments()
    assert segment.version_spans == [VersionSpan(3, 2, 4), VersionSpan(5, 1, 5), VersionSpan(7, 1, 5)]


def test_what_was_carried_on_says_so_only_where_it_makes_a_difference() -> None:
    capture = Capture()
    carried_on = [
        VersionSpan(0, 2, 4, kv="salt"),
        VersionSpan(2, 1, 4, kv="recompute"),
        VersionSpan(3, 1, 5, kv="salt"),
        VersionSpan(4, 1, 5, kv="recompute"),
        VersionSpan(5, 1, 5, kv="recompute"),
    ]
    capture.record(None, [5], [8] * 6, [-0.5] * 6, carried_on, PLAIN)
    (segment,) = capture.segments()
    assert segment.version_spans == [
        VersionSpan(1, 3, 4, kv="salt"),
        VersionSpan(4, 1, 5, kv="salt"),
        VersionSpan(5, 2, 5, kv="recompute"),
    ]


def test_what_broke_off_says_why_and_what_branched_trains_only_its_own() -> None:
    capture = Capture()
    first = capture.record(None, [5], [8], [-0.5], [VersionSpan(0, 1, 0)], PLAIN)
    capture.record(first, [6], [9, 9], [-0.5] * 2, [VersionSpan(0, 2, 0)], PLAIN)
    capture.record(first, [7], [10], [-0.5], [VersionSpan(0, 1, 0)], PLAIN)
    capture.record(None, [5, 5], [11], [-0.5], [VersionSpan(0, 1, 0)], PLAIN, "compaction")
    found = [
        (unpack_tokens(segment.token_ids).tolist(), list(segment.loss_mask), segment.break_reason)
        for segment in capture.segments()
    ]
    assert found == [
        ([5, 8, 6, 9, 9], [0, 1, 0, 1, 1], None),
        ([5, 8, 7, 10], [0, 0, 0, 1], "branch"),
        ([5, 5, 11], [0, 0, 1], "compaction"),
    ]


def test_a_conversation_of_many_turns_needs_no_recursion() -> None:
    capture = Capture()
    for _ in range(3000):
        capture.record(capture.tip, [5], [8], [-0.5], [VersionSpan(0, 1, 0)], PLAIN)
    (segment,) = capture.segments()
    assert list(itertools.islice(segment.loss_mask, 4)) == [0, 1, 0, 1]


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
    capture.record(None, [3], [4], [-1.0], [VersionSpan(0, 1, 0)], PLAIN)
    with pytest.raises(CaptureError, match=says):
        capture.record(capture.tip, [3], token_ids, logprobs, spans, PLAIN)
    assert capture.context == [3, 4]
    check_trajectory(as_trajectory(capture.segments(), capture.samplings))


@given(trees, st.sets(st.integers(0, 7)))
def test_what_nobody_saw_is_left_out_unless_something_that_was_seen_follows_it(
    branches: list[tuple[int, Sampled]], unseen: set[int]
) -> None:
    capture, nodes = grow(branches, list(range(len(branches))))
    whole = capture.layout().segments
    capture.leave_out([nodes[number] for number in unseen if number in nodes])
    layout = capture.layout()
    segments = layout.segments
    check_trajectory(as_trajectory(segments, capture.samplings))
    kept = {number for number, node in nodes.items() if node not in capture.left_out}
    for number, (extends, _) in enumerate(branches):
        if number not in unseen:
            assert number in kept
        elif number in kept:  # somebody saw what came of it
            assert any(child in kept for child, (parent, _) in enumerate(branches) if parent == number < child)
        if number in kept and extends < number:
            assert extends in kept
    assert capture.trained == sum(len(branches[number][1].token_ids) for number in kept)
    assert sum(sum(unpack_mask(segment.loss_mask).tolist()) for segment in segments) == capture.trained
    assert capture.answers == len(kept)
    assert set(layout.positions) >= {nodes[number] for number in kept if branches[number][1].token_ids}
    # It is as if they had never been; and nothing is forgotten.
    alone, _ = grow_some(branches, sorted(kept))
    assert [rows(each, capture.samplings) for each in segments] == [
        rows(each, alone.samplings) for each in alone.segments()
    ]
    capture.leave_out(())
    assert capture.segments() == whole


def grow_some(branches: list[tuple[int, Sampled]], numbers: list[int]) -> tuple[Capture, dict[int, Node]]:
    """Record these answers alone."""
    place = {number: index for index, number in enumerate(numbers)}
    chosen = [
        (place[branches[number][0]] if branches[number][0] < number else index, branches[number][1])
        for index, number in enumerate(numbers)
    ]
    return grow(chosen, list(range(len(chosen))))
