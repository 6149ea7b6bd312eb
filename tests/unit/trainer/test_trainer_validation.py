"""Validation: whatever bytes are in the stream, they are a valid trajectory or a cause, and never an exception."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.batching import DropCause, Member
from services.run_store.stream import StreamEntry
from services.wire.packed import pack_logprobs, pack_mask
from services.wire.sampling import SamplingParams
from services.wire.trajectory import RewardSpan, Segment, Trajectory, VersionSpan, encode_trajectory, vocabulary_digest
from tests.support.examples import examples
from tests.support.trajectories import a_rollout, a_segment
from trainer.data.validation import Rejected, Validator, group_of

VOCABULARY = vocabulary_digest({"a": 0, "b": 1})
VALIDATOR = Validator("r", vocabulary=64, longest=32, tokenizer=VOCABULARY)
SOUND = a_rollout([a_segment([5, 6], [7, 8], [-1.0, -2.0], [3, 3])], 1.0)
_SEGMENT = SOUND.segments[0]


def judged(trajectory: Trajectory, newest: int = 3) -> Member[Trajectory] | Rejected:
    return VALIDATOR.judge(StreamEntry("1-0", encode_trajectory(trajectory)), newest)


def segment(**changes: object) -> dict[str, list[Segment]]:
    return {"segments": [msgspec.structs.replace(_SEGMENT, **changes)]}


def test_a_sound_trajectory_is_a_member() -> None:
    for tokenizer in ("", VOCABULARY):
        member = judged(msgspec.structs.replace(SOUND, tokenizer=tokenizer))
        assert isinstance(member, Member)
        assert (member.group, member.index, member.group_size) == ("g0", 0, 4)


FAULTS: list[tuple[DropCause, dict[str, object]]] = [
    (DropCause.BAD_NUMBER, segment(logprobs=pack_logprobs([0, 0, math.nan, -2]))),
    (DropCause.BAD_NUMBER, segment(logprobs=pack_logprobs([0, 0, -math.inf, -2]))),
    (DropCause.BAD_NUMBER, segment(logprobs=pack_logprobs([0, 0, 0.7, -2]))),
    (DropCause.BAD_NUMBER, {"reward": math.nan}),
    (DropCause.BAD_NUMBER, {"reward": -1e300}),
    (DropCause.BAD_NUMBER, {"reward_components": {"success": math.inf}}),
    (DropCause.BAD_NUMBER, {"reward_spans": [RewardSpan(0, 2, 1, math.nan)]}),
    (DropCause.BAD_NUMBER, {"opened_at": math.nan}),
    (DropCause.MALFORMED, segment(loss_mask=pack_mask([0, 0, 1, 1, 1]))),
    (DropCause.MALFORMED, segment(loss_mask=pack_mask([0, 1, 1, 1]))),
    (DropCause.MALFORMED, segment(loss_mask=pack_mask([0, 0, 1, 2]))),
    (DropCause.MALFORMED, segment(token_ids=_SEGMENT.token_ids[:-1])),
    (DropCause.MALFORMED, segment(version_spans=[VersionSpan(2, 9, 3)])),
    (DropCause.MALFORMED, segment(version_spans=[VersionSpan(2, 2, -1)])),
    (DropCause.MALFORMED, segment(version_spans=[VersionSpan(2, 2, 3, sampling=1)])),
    (DropCause.MALFORMED, {"segments": [a_segment([], [7], [-1.0], [3])]}),
    (DropCause.MALFORMED, {"reward_spans": [RewardSpan(0, 3, 5, 1.0)]}),
    (DropCause.MALFORMED, {"reward_spans": [RewardSpan(1, 0, 1, 1.0)]}),
    (DropCause.EMPTY, {"segments": []}),
    (DropCause.EMPTY, {"segments": [a_segment([5, 6], [], [], [])]}),
    (DropCause.INCONSISTENT_GROUP, {"group_size": 0}),
    (DropCause.FUTURE_VERSION, {"segments": [a_segment([5], [6], [-1.0], [4])]}),
    (DropCause.UNKNOWN_TOKEN, {"segments": [a_segment([5], [64], [-1.0], [3])]}),
    (DropCause.TOO_LONG, {"segments": [a_segment([5] * 32, [6], [-1.0], [3])]}),
    (DropCause.TOKENIZER, {"tokenizer": vocabulary_digest({"a": 1, "b": 0})}),
    (DropCause.SAMPLING, {"samplings": [SamplingParams(max_tokens=4, top_p=0.9)]}),
    (DropCause.SAMPLING, {"samplings": [SamplingParams(max_tokens=4, temperature=math.nan)]}),
    (DropCause.SAMPLING, {"samplings": [SamplingParams(max_tokens=4, temperature=math.inf)]}),
    (DropCause.FOREIGN_RUN, {"run_id": "another"}),
    (DropCause.UNDECODABLE, {"schema": 99}),
]


@pytest.mark.parametrize(("cause", "changes"), FAULTS)
def test_what_cannot_be_trained_is_rejected_for_what_is_wrong(cause: DropCause, changes: dict[str, object]) -> None:
    rejected = judged(msgspec.structs.replace(SOUND, **changes))
    assert isinstance(rejected, Rejected)
    assert (rejected.cause, rejected.group) == (cause, "g0")
    assert "g0/0" in rejected.why


def test_a_trainer_without_a_tokenizer_judges_by_ids() -> None:
    entry = StreamEntry("1-0", encode_trajectory(msgspec.structs.replace(SOUND, tokenizer="another")))
    assert isinstance(replace(VALIDATOR, tokenizer="").judge(entry, 3), Member)


def test_a_vocabulary_is_its_tokens_with_their_ids() -> None:
    assert vocabulary_digest({"b": 1, "a": 0}) == VOCABULARY
    others = [{"a": 0}, {"a": 0, "b": 2}, {"a": 0, "b": 1, "c": 2}, {"ab": 0, "": 1}, {"a": 0, "\udc80": 1}]
    assert len({VOCABULARY, *map(vocabulary_digest, others)}) == 6


@examples(1000)
@given(st.randoms(use_true_random=False))
def test_any_bytes_are_judged(chance: object) -> None:
    """A sound entry, mutilated: judged without an exception, and what is a member holds what training relies on."""
    numbers = np.random.default_rng(chance.randrange(1 << 32))  # type: ignore[attr-defined]
    payload = bytearray(encode_trajectory(SOUND))
    for _ in range(numbers.integers(1, 6)):
        place, width = int(numbers.integers(len(payload))), int(numbers.integers(0, 9))
        payload[place : place + width * int(numbers.integers(2))] = numbers.bytes(int(numbers.integers(0, 9)))
    entry = StreamEntry("1-0", bytes(payload))
    verdict = VALIDATOR.judge(entry, 3)
    if isinstance(verdict, Rejected):
        assert verdict.why
        return
    assert verdict.payload.sampled_tokens() > 0
    for part in verdict.payload.segments:
        assert np.isfinite(np.frombuffer(part.logprobs, "<f4")).all()
        assert max((span.version for span in part.version_spans), default=0) <= 3


SOUND_ONES: list[dict[str, object]] = [
    {},
    {"tokenizer": VOCABULARY},
    {"segments": [_SEGMENT, a_segment([5, 6, 7, 8], [9, 1, 2], [-1.0, 0.0, -0.1], [1, 1, 3])]},
    {"segments": [a_segment([5], [], [], []), _SEGMENT]},
    {"samplings": [SamplingParams(max_tokens=4, temperature=0.7)]},
    {"reward_spans": [RewardSpan(0, 2, 1, 0.5)]},
    {"reward_components": {"success": 1.0}},
    segment(logprobs=pack_logprobs([0.7, 0, -1, -2])),
    {"segments": [a_segment([5] * 31, [6], [-1.0], [3])]},
    {"segments": [a_segment([63], [63], [1e-4], [0])]},
]
_TOO_LARGE: list[dict[str, object]] = [
    segment(version_spans=[VersionSpan(2, 2, 1 << 63)]),
    segment(version_spans=[VersionSpan(1 << 62, 1 << 62, 3)]),
    segment(version_spans=[VersionSpan(-1, 3, 3)]),
    segment(version_spans=[VersionSpan(3, 1, 3), VersionSpan(2, 1, 3)]),
    segment(version_spans=[VersionSpan(2, 2, 3), VersionSpan(4, 0, 3)]),
    segment(version_spans=[VersionSpan(2, 2, 3, sampling=-1)]),
    {"samplings": []},
    {"opened_at": math.inf},
    {"member": 9},
]


@examples(300)
@given(
    st.lists(st.sampled_from([*SOUND_ONES * 4, *(changes for _, changes in FAULTS), *_TOO_LARGE]), max_size=6),
    st.sampled_from(
        [
            VALIDATOR,
            replace(VALIDATOR, cost="success"),
            replace(VALIDATOR, greedy_baseline=True),
            replace(VALIDATOR, tokenizer=""),
        ]
    ),
    st.randoms(use_true_random=False),
)
def test_a_read_is_judged_as_its_entries_are(
    several: list[dict[str, object]], validator: Validator, chance: object
) -> None:
    """Whatever a read holds, sound ones, faults of every kind and mutilated bytes: as `judge` says of each."""
    numbers = np.random.default_rng(chance.randrange(1 << 32))  # type: ignore[attr-defined]
    payloads = [bytearray(encode_trajectory(msgspec.structs.replace(SOUND, **changes))) for changes in several]
    if payloads and numbers.integers(2):
        mutilated = payloads[int(numbers.integers(len(payloads)))]
        place = int(numbers.integers(len(mutilated)))
        mutilated[place : place + int(numbers.integers(3))] = numbers.bytes(int(numbers.integers(0, 4)))
    entries = [StreamEntry(f"{number}-0", bytes(payload)) for number, payload in enumerate(payloads)]
    assert validator.judge_all(entries, 3) == [validator.judge(entry, 3) for entry in entries]


@pytest.mark.parametrize("changes", [changes for _, changes in FAULTS] + _TOO_LARGE[:-1])
def test_one_fault_does_not_pass_among_sound_ones(changes: dict[str, object]) -> None:
    every = [SOUND, msgspec.structs.replace(SOUND, **changes), SOUND]
    entries = [StreamEntry(f"{number}-0", encode_trajectory(one)) for number, one in enumerate(every)]
    verdicts = VALIDATOR.judge_all(entries, 3)
    assert [isinstance(verdict, Member) for verdict in verdicts] == [True, False, True]


def test_the_usual_read_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [changes for changes in SOUND_ONES if "reward_spans" not in changes and "0.7" not in str(changes)]
    entries = [
        StreamEntry(f"{number}-0", encode_trajectory(msgspec.structs.replace(SOUND, **changes)))
        for number, changes in enumerate(plain)
        if changes.get("segments") != SOUND_ONES[7]["segments"]
    ]
    expected = [VALIDATOR.judge(entry, 3) for entry in entries]
    assert all(isinstance(verdict, Member) for verdict in expected)

    def one_by_one(*_: object) -> None:
        raise AssertionError("each was judged by itself")

    monkeypatch.setattr(Validator, "judge", one_by_one)
    assert VALIDATOR.judge_all(entries, 3) == expected


def test_a_group_is_read_from_as_little_as_there_is() -> None:
    assert group_of(StreamEntry("1-0", msgspec.msgpack.encode({"group_id": "g7"}))) == "g7"
    assert group_of(StreamEntry("1-0", b"\xff" * 40)) is None
    assert group_of(StreamEntry("1-0", b"\x91" * 100_000)) is None
