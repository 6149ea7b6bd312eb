"""Validation of stream entries: one that this trainer cannot train on is dropped with a cause, never silently.

entry ──decode──► trajectory ──► ours? ──► sampled from a known distribution?   ──► fits the model? ──► Member
  └──────────────────┴──────────────┴────────────────┴──────────────────────────────┴───────────────► Rejected(cause)

One bad entry must not end a run, nor reach its loss: whatever bytes are in the stream, `judge` answers one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from services.policies.batching import DropCause, Member, Objection
from services.run_store.stream import StreamEntry
from services.wire.choices import BlobError, attach, check_experts, check_kept, without_experts
from services.wire.errors import UNDECODABLE, WireError
from services.wire.packed import unpack_kept, unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import (
    TRAJECTORY_SCHEMA,
    ContradictionError,
    NotFiniteError,
    Segment,
    Trajectory,
    decode_trajectory,
    parse_trajectory,
)

ABOVE_ZERO = 1e-3
"""A logprob may be above 0 by rounding, not by more."""
LARGEST_REWARD = 1e12
"""Beyond, squares of differences between siblings lose what distinguishes them, or overflow."""


@dataclass(frozen=True)
class Rejected:
    """`group`: whose sibling it was, as far as that could be read; the group can never be trained without it."""

    entry: str
    cause: DropCause
    why: str
    group: str | None


class _Header(msgspec.Struct):
    group_id: str


_headers = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True)
class Validator:
    """`vocabulary`: token ids lie below it. `longest`: tokens a segment may have. `tokenizer`: digest of the vocabulary.

    A trajectory of which the writer knew no tokenizer is judged by its ids alone. `greedy_baseline`: the first sibling of a
    group was sampled greedily. `cost`: a reward component that there must be. `masks`: tokens that `top_p`, `top_k` or
    `min_p` left are trained, where it is known which these are. `experts`: layers of the model that choose, how many
    experts each, and of how many, where they are replayed; None where what is known of them is let go of.
    """

    run_id: str
    vocabulary: int
    longest: int
    tokenizer: str = ""
    greedy_baseline: bool = False
    cost: str | None = None
    masks: bool = True
    experts: tuple[int, int, int] | None = None

    def judge_all(self, entries: Sequence[StreamEntry], newest_version: int) -> list[Member[Trajectory] | Rejected]:
        """`judge` of each. Where all are sound, which is the rule, they are looked at together, for a third of the time."""
        if any(entry.ref for entry in entries):
            return [self.judge(entry, newest_version) for entry in entries]
        try:
            trajectories = [parse_trajectory(entry.payload) for entry in entries]
        except WireError:
            return [self.judge(entry, newest_version) for entry in entries]
        if not self._all_sound(trajectories, newest_version):
            return [self.judge(entry, newest_version) for entry in entries]
        return [_member(entry, trajectory) for entry, trajectory in zip(entries, trajectories, strict=True)]

    def judge(self, entry: StreamEntry, newest_version: int) -> Member[Trajectory] | Rejected:
        """`newest_version`: the newest policy version that exists; a token beyond it lies."""
        try:
            trajectory = decode_trajectory(entry.payload)
        except WireError as error:
            return Rejected(entry.stream_id, _cause_of(error), str(error), group_of(entry))
        if any(segment.choices is not None for segment in trajectory.segments):
            why = f"trajectory {trajectory.trajectory_id} holds what its engine chose, which belongs into a blob"
            return Rejected(entry.stream_id, DropCause.MALFORMED, why, trajectory.group_id)
        if entry.ref:
            try:
                trajectory = attach(trajectory, entry.ref, entry.blob)
                for segment in trajectory.segments:
                    check_kept(segment, self.vocabulary)
                    if self.experts is not None:
                        check_experts(segment, *self.experts)
                if self.experts is None:
                    trajectory = without_experts(trajectory)
            except BlobError as error:
                why = f"trajectory {trajectory.trajectory_id}: {error.what}"
                return Rejected(entry.stream_id, DropCause.NO_BLOB, why, trajectory.group_id)
        objection = self._objection(trajectory, newest_version)
        if objection is not None:
            cause, why = objection
            return Rejected(entry.stream_id, cause, f"trajectory {trajectory.trajectory_id} {why}", trajectory.group_id)
        return _member(entry, trajectory)

    def _all_sound(self, trajectories: Sequence[Trajectory], newest_version: int) -> bool:
        """True only where `judge` objects to none. Sound ones of rare kinds may count as doubtful."""
        if self.greedy_baseline or not trajectories:
            return False
        whole: SamplingParams | None = None
        for one in trajectories:
            if not self._plain(one):
                return False
            for sampling in one.samplings:
                # Most often all are alike.
                if sampling != whole:
                    if not sampling.whole:
                        return False
                    whole = sampling
            if not _spans_fit(one, newest_version):
                return False
        segments = [segment for one in trajectories for segment in one.segments]
        tokens = unpack_tokens(b"".join([segment.token_ids for segment in segments]))
        logprobs = unpack_logprobs(b"".join([segment.logprobs for segment in segments]))
        return bool(
            max(len(segment.loss_mask) for segment in segments) <= self.longest
            # Read without their sign, negative ones are the largest.
            and int(np.maximum.reduce(tokens.view(np.uint32))) < self.vocabulary
            and math.isfinite(np.add.reduce(logprobs, dtype=np.float64))
            and float(np.maximum.reduce(logprobs)) <= ABOVE_ZERO
        )

    def _plain(self, one: Trajectory) -> bool:
        return (
            one.schema == TRAJECTORY_SCHEMA
            and one.run_id == self.run_id
            and (not one.tokenizer or not self.tokenizer or one.tokenizer == self.tokenizer)
            # Not of a NaN either.
            and abs(one.reward) <= LARGEST_REWARD
            and math.isfinite(one.opened_at)
            and math.isfinite(one.finished_at)
            and all(map(math.isfinite, one.reward_components.values()))
            and not one.reward_spans
            and all(segment.choices is None for segment in one.segments)
            and one.group_size >= 2
            and (self.cost is None or self.cost in one.reward_components)
        )

    def _objection(self, trajectory: Trajectory, newest_version: int) -> Objection | None:
        if trajectory.run_id != self.run_id:
            return DropCause.FOREIGN_RUN, f"belongs to run {trajectory.run_id}"
        if trajectory.tokenizer and self.tokenizer and trajectory.tokenizer != self.tokenizer:
            what = f"is of vocabulary {trajectory.tokenizer} (server {trajectory.server_id})"
            return DropCause.TOKENIZER, f"{what}, the trainer's is {self.tokenizer}"
        if abs(trajectory.reward) > LARGEST_REWARD:
            return DropCause.BAD_NUMBER, f"has a reward of {trajectory.reward:g}: as good as infinite"
        if trajectory.sampled_tokens() == 0:
            return DropCause.EMPTY, "has no sampled token"
        if self.cost is not None and self.cost not in trajectory.reward_components:
            return DropCause.NO_COST, f"has no reward component {self.cost!r}"
        baseline = self.greedy_baseline and trajectory.member == 0
        for sampling in trajectory.samplings:
            if baseline and (sampling.temperature != 0.0 or sampling.shifts):
                return DropCause.SAMPLING, f"is its group's baseline and was sampled with {sampling}: not greedily"
            if not baseline and not sampling.whole and not (self.masks and sampling.only_cuts):
                return DropCause.SAMPLING, f"was sampled with {sampling}: not from the whole distribution"
        if untold := _untold(trajectory):
            cut = next(sampling for sampling in trajectory.samplings if sampling.only_cuts)
            what = f"was sampled with {cut}, and its engine did not tell what that left of {untold} tokens"
            return DropCause.SAMPLING, what
        if trajectory.group_size < 2:
            return DropCause.INCONSISTENT_GROUP, f"is of a group of {trajectory.group_size}"
        for segment in trajectory.segments:
            objection = self._of_segment(segment, newest_version)
            if objection is not None:
                return objection
        return None

    def _of_segment(self, segment: Segment, newest_version: int) -> Objection | None:
        tokens = unpack_tokens(segment.token_ids)
        if len(tokens) > self.longest:
            return DropCause.TOO_LONG, f"has a segment of {len(tokens)} tokens, {self.longest} are taken"
        # Read without their sign, negative ones are the largest.
        if len(tokens) and int(np.maximum.reduce(tokens.view(np.uint32))) >= self.vocabulary:
            return DropCause.UNKNOWN_TOKEN, f"has a token outside 0 … {self.vocabulary - 1}"
        if segment.version_spans and segment.version_spans[0].start == 0:
            return DropCause.MALFORMED, "has a sampled token with nothing before it"
        newest = max((span.version for span in segment.version_spans), default=0)
        if newest > newest_version:
            return DropCause.FUTURE_VERSION, f"has tokens of version {newest}, the trainer is at {newest_version}"
        logprobs = unpack_logprobs(segment.logprobs)
        # Where nothing was sampled a logprob says nothing, so this is looked at closer only where it would matter.
        if len(logprobs) and float(np.maximum.reduce(logprobs)) > ABOVE_ZERO:
            highest = float(logprobs[unpack_mask(segment.loss_mask) == 1].max(initial=0.0))
            if highest > ABOVE_ZERO:
                return DropCause.BAD_NUMBER, f"has a logprob of {highest:g}: no probability is above 1"
        return None


def _untold(trajectory: Trajectory) -> int:
    """How many of its tokens were sampled from a truncated distribution of which nobody knows what it was."""
    if not any(sampling.only_cuts for sampling in trajectory.samplings):
        return 0
    untold = 0
    for segment in trajectory.segments:
        cut = np.repeat(
            [trajectory.samplings[span.sampling].only_cuts for span in segment.version_spans],
            [span.length for span in segment.version_spans],
        )
        packed = b"" if segment.choices is None else segment.choices.kept_counts
        counts = unpack_kept(packed) if packed else np.zeros(len(cut), dtype=np.uint32)
        untold += int(np.count_nonzero(cut & (counts == 0)))
    return untold


def _spans_fit(one: Trajectory, newest_version: int) -> bool:
    """Whether arrays are of one length, and spans say where the mask is 1, in order, of versions and samplings there are.

    At least one token must be sampled, and none before any other.
    """
    samplings, sampled = len(one.samplings), False
    for segment in one.segments:
        mask, end, covered = segment.loss_mask, 0, b""
        length = len(mask)
        if not len(segment.token_ids) == len(segment.logprobs) == 4 * length:
            return False
        for span in segment.version_spans:
            start, count = span.start, span.length
            if start < max(1, end) or count < 1 or start + count > length:
                return False
            if not (0 <= span.version <= newest_version and 0 <= span.sampling < samplings):
                return False
            covered += bytes(start - end) + b"\x01" * count
            end, sampled = start + count, True
        if covered + bytes(length - end) != mask:
            return False
    return sampled


def _member(entry: StreamEntry, trajectory: Trajectory) -> Member[Trajectory]:
    return Member(
        entry=entry.stream_id,
        group=trajectory.group_id,
        ordinal=trajectory.group_ordinal,
        group_size=trajectory.group_size,
        index=trajectory.member,
        payload=trajectory,
    )


def group_of(entry: StreamEntry) -> str | None:
    """The group that an entry says it is of; None where not even that can be read."""
    try:
        return _headers.decode(entry.payload).group_id
    except UNDECODABLE:
        return None


def _cause_of(error: WireError) -> DropCause:
    if isinstance(error, NotFiniteError):
        return DropCause.BAD_NUMBER
    return DropCause.MALFORMED if isinstance(error, ContradictionError) else DropCause.UNDECODABLE
