"""Screening: is a stream entry something this trainer can train on? If not, it is dropped with a cause, never silently.

entry ──decode──► trajectory ──► ours? ──► drawn from the whole distribution? ──► fits the model? ──► Member
  └──────────────────┴──────────────┴────────────────┴──────────────────────────────┴───────────────► Rejected(cause)
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.policies.batching import DropCause, Member
from services.stream import StreamEntry
from services.wire.errors import WireError
from services.wire.packed import unpack_tokens
from services.wire.trajectory import Trajectory, decode_trajectory


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
class Screen:
    """`vocabulary`: token ids lie below it. `longest`: tokens a segment may have."""

    run_id: str
    vocabulary: int
    longest: int

    def judge(self, entry: StreamEntry, newest_version: int) -> Member[Trajectory] | Rejected:
        """`newest_version`: the newest policy version that exists; a token beyond it lies."""
        try:
            trajectory = decode_trajectory(entry.payload)
        except WireError as error:
            return Rejected(entry.stream_id, DropCause.UNDECODABLE, str(error), _group_of(entry.payload))
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

    def _objection(self, trajectory: Trajectory, newest_version: int) -> tuple[DropCause, str] | None:
        if trajectory.run_id != self.run_id:
            return DropCause.FOREIGN_RUN, f"belongs to run {trajectory.run_id}"
        for sampling in trajectory.samplings:
            if not sampling.whole:
                return DropCause.SAMPLING, f"was drawn with {sampling}: not from the whole distribution"
        if trajectory.group_size < 2:
            return DropCause.INCONSISTENT_GROUP, f"is of a group of {trajectory.group_size}"
        for segment in trajectory.segments:
            tokens = unpack_tokens(segment.token_ids)
            if len(tokens) > self.longest:
                return DropCause.TOO_LONG, f"has a segment of {len(tokens)} tokens, the model takes {self.longest}"
            if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary):
                return DropCause.UNKNOWN_TOKEN, f"has a token outside 0 … {self.vocabulary - 1}"
            if segment.version_spans and segment.version_spans[0].start == 0:
                return DropCause.INCONSISTENT_GROUP, "has a sampled token with nothing before it"
            newest = max((span.version for span in segment.version_spans), default=0)
            if newest > newest_version:
                return DropCause.FUTURE_VERSION, f"has tokens of version {newest}, the trainer is at {newest_version}"
        return None


def _group_of(payload: bytes) -> str | None:
    try:
        return _headers.decode(payload).group_id
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
