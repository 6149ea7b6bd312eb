"""Validation of stream entries: one that this trainer cannot train on is dropped with a cause, never silently.

entry ──decode──► trajectory ──► ours? ──► sampled from the whole distribution? ──► fits the model? ──► Member
  └──────────────────┴──────────────┴────────────────┴──────────────────────────────┴───────────────► Rejected(cause)

One bad entry must not end a run, nor reach its loss: whatever bytes are in the stream, `judge` answers one of the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from services.policies.batching import DropCause, Member, Objection
from services.run_store.stream import StreamEntry
from services.wire.errors import UNDECODABLE, WireError
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.trajectory import (
    ContradictionError,
    NotFiniteError,
    Segment,
    Trajectory,
    decode_trajectory,
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
    group was sampled greedily. `cost`: a reward component that there must be.
    """

    run_id: str
    vocabulary: int
    longest: int
    tokenizer: str = ""
    greedy_baseline: bool = False
    cost: str | None = None

    def judge(self, entry: StreamEntry, newest_version: int) -> Member[Trajectory] | Rejected:
        """`newest_version`: the newest policy version that exists; a token beyond it lies."""
        try:
            trajectory = decode_trajectory(entry.payload)
        except WireError as error:
            return Rejected(entry.stream_id, _cause_of(error), str(error), group_of(entry))
        objection = self._objection(trajectory, newest_version)
        if objection is not None:
            cause, why = objection
            return Rejected(entry.stream_id, cause, f"trajectory {trajectory.trajectory_id} {why}", trajectory.group_id)
        return Member(
            entry=entry.stream_id,
            group=trajectory.group_id,
            ordinal=trajectory.group_ordinal,
            group_size=trajectory.group_size,
            index=trajectory.member,
            payload=trajectory,
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
            if not baseline and not sampling.whole:
                return DropCause.SAMPLING, f"was sampled with {sampling}: not from the whole distribution"
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
            return DropCause.TOO_LONG, f"has a segment of {len(tokens)} tokens, the model takes {self.longest}"
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
