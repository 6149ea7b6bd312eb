"""What is known of each token of a kept rollout, and where a segment left the one before it.

tokens        p  p  p  s  s  e  s      p prompt, s sampled, e environment
sampled       0  0  0  1  1  0  1
trained       0  0  0  1  0  0  1      sampled, at most K old, in a rollout that was trained on
version       ·  ·  ·  4  3  ·  5      of sampled tokens, as are logprob, current and advantage
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

from services.policies.staleness import window
from services.run_store.rollouts.record import KeptRollout, sampled_mask
from services.wire.packed import Float32Array, Int32Array, UInt8Array, unpack_logprobs, unpack_tokens
from services.wire.trajectory import BreakReason, Segment


@dataclass(frozen=True, kw_only=True)
class SegmentTokens:
    """Of a segment's `n` tokens, `[n]` each: `ids` int32, `sampled` and `trained` 0 or 1, `version` int32, −1 where nothing
    was sampled; float32, NaN there: `logprob`, the engine's, `current`, the trainer's before the step (NaN too where it
    computed none), `advantage`."""

    ids: Int32Array
    sampled: UInt8Array
    trained: UInt8Array
    version: Int32Array
    logprob: Float32Array
    current: Float32Array
    advantage: Float32Array

    @property
    def ratio(self) -> Float32Array:
        """float32 `[n]`: π / π_behaviour before the step."""
        ratio: Float32Array = np.exp(self.current - self.logprob)
        return ratio


def segment_tokens(kept: KeptRollout, number: int) -> SegmentTokens:
    """Of segment `number`. Raises IndexError where there is none."""
    segment, columns = kept.trajectory.segments[number], kept.columns[number]
    ids, sampled = unpack_tokens(segment.token_ids), sampled_mask(segment)
    version, trained = np.full(len(ids), -1, dtype=np.int32), np.zeros(len(ids), dtype=np.uint8)
    spans = [(span.start, span.length, span.version) for span in segment.version_spans]
    for span, (start, length, of) in zip(window(spans, kept.version, kept.k), spans, strict=True):
        version[start : start + length] = of
        trained[start : start + length] = span.fresh and kept.trained
    current, advantage = columns.spread(int(sampled.sum()))
    places = sampled == 1

    def spread(values: Float32Array | None) -> Float32Array:
        whole = np.full(len(ids), np.nan, dtype=np.float32)
        if values is not None:
            whole[places] = values
        return whole

    logprobs = unpack_logprobs(segment.logprobs)[places]
    return SegmentTokens(
        ids=ids,
        sampled=sampled,
        trained=trained,
        version=version,
        logprob=spread(logprobs),
        current=spread(current),
        advantage=spread(advantage),
    )


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start … start + length − 1` of a segment, which the policy sampled in one go, or which it was given.

    `repeated`: they stood in an earlier segment already. `reward`: of the call, where it was given one. `began_at`,
    `ended_at`: of the calls that sampled it, Unix seconds, where they are known.
    """

    start: int
    length: int
    sampled: bool
    repeated: bool = False
    reward: float | None = None
    began_at: float | None = None
    ended_at: float | None = None


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """Why segment `segment` did not go on from `before`, and where: the first token that differs is number `at`.

    `token`, `token_before`: that one in each; None where one of them ends there.
    """

    segment: int
    before: int
    reason: BreakReason | None
    at: int
    token: int | None
    token_before: int | None


def turns_of(kept: KeptRollout, number: int, known: int = 0) -> list[Turn]:
    """The turns of segment `number`, in order. `known`: how many of its first tokens an earlier segment has."""
    sampled = sampled_mask(kept.trajectory.segments[number])
    edges = {0, len(sampled), *(np.flatnonzero(np.diff(sampled)) + 1).tolist()}
    edges |= {min(known, len(sampled))}
    rewards = [
        (span.start + span.length - 1, span.reward) for span in kept.trajectory.reward_spans if span.segment == number
    ]
    times = [each for each in kept.trajectory.call_times if each.segment == number]
    cuts, turns = sorted(edges), list[Turn]()
    for start, end in pairwise(cuts):
        # A call's reward is at its last token.
        given = next((reward for last, reward in rewards if start <= last < end), None)
        calls = [each for each in times if start <= each.start < end]
        turns.append(
            Turn(
                start=start,
                length=end - start,
                sampled=bool(sampled[start]),
                repeated=end <= known,
                reward=given,
                began_at=min((each.began_at for each in calls), default=None),
                ended_at=max((each.ended_at for each in calls), default=None),
            )
        )
    return turns


def break_before(kept: KeptRollout, number: int) -> Break | None:
    """Where segment `number` left the earlier one that it shares most with; None for the first."""
    segments = kept.trajectory.segments
    if number == 0:
        return None
    own = unpack_tokens(segments[number].token_ids)
    common = [shared_prefix(own, unpack_tokens(each.token_ids)) for each in segments[:number]]
    # Of several that share as much, the nearest.
    before = max(range(number), key=lambda each: (common[each], each))
    at, other = common[before], unpack_tokens(segments[before].token_ids)
    return Break(
        segment=number,
        before=before,
        reason=segments[number].break_reason,
        at=at,
        token=int(own[at]) if at < len(own) else None,
        token_before=int(other[at]) if at < len(other) else None,
    )


def shared_prefix(one: Int32Array, other: Int32Array) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def new_tokens(segments: Sequence[Segment]) -> list[tuple[Int32Array, int]]:
    """Of each segment its tokens, and how many of the first of them an earlier segment has."""
    ids = [unpack_tokens(segment.token_ids) for segment in segments]
    return [
        (own, max((shared_prefix(own, each) for each in ids[:number]), default=0)) for number, own in enumerate(ids)
    ]


UNKNOWN = "�"


def texts_of(ids: Int32Array, pieces: Mapping[int, bytes]) -> list[str]:
    """The text of each token. A character of several tokens is with the last of them; the others are empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    unknown = UNKNOWN.encode()
    texts = [decoder.decode(pieces.get(token, unknown)) for token in ids.tolist()]
    if texts and (left := decoder.decode(b"", final=True)):
        texts[-1] += left
    return texts
