"""One kept rollout: the trajectory as the stream had it, and what the trainer computed of its tokens.

On disk a segment has no mask, which its version spans say, and logprobs of its sampled tokens alone: what an agent reads
is most of what its segments hold. Reading puts both back.
"""

from __future__ import annotations

import msgspec
import numpy as np

from services.wire.errors import UNDECODABLE, WireError
from services.wire.packed import Float32Array, UInt8Array, unpack_logprobs
from services.wire.trajectory import Segment, Trajectory

RECORD_SCHEMA = 1


class SegmentColumns(msgspec.Struct, frozen=True, array_like=True):
    """Of a segment's sampled tokens, packed float32, in their order.

    `current`: the trainer's logprobs before the step; empty where the segment gave no gradient, and none were computed.
    `advantages`: one element where all are equal.
    """

    current: bytes
    advantages: bytes

    @staticmethod
    def of(current: bytes, advantages: bytes) -> SegmentColumns:
        """Without repeating advantages that are equal."""
        first = advantages[:4]
        return SegmentColumns(current, first if advantages == first * (len(advantages) // 4) else advantages)

    def spread(self, sampled: int) -> tuple[Float32Array | None, Float32Array]:
        """Current logprobs and advantages, `[sampled]` each."""
        advantages = unpack_logprobs(self.advantages)
        if len(advantages) == 1:
            advantages = np.repeat(advantages, sampled)
        return (unpack_logprobs(self.current) if self.current else None), advantages


class KeptRollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`step`: that trained it, from 1, starting from policy `version` under the bound `k`. `trained`: false where it was
    only compared with. `columns`: of each segment."""

    schema: int = msgspec.field(default_factory=lambda: RECORD_SCHEMA)
    step: int
    version: int
    k: int
    trained: bool
    trajectory: Trajectory
    columns: list[SegmentColumns]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KeptRollout)


def sampled_mask(segment: Segment) -> UInt8Array:
    """uint8 `[n]`: 1 where the policy sampled, as the version spans say."""
    mask = np.zeros(len(segment.token_ids) // 4, dtype=np.uint8)
    for span in segment.version_spans:
        mask[span.start : span.start + span.length] = 1
    return mask


def encode_kept(kept: KeptRollout) -> bytes:
    """Msgpack, with condensed segments."""
    segments = [_condensed(segment) for segment in kept.trajectory.segments]
    trajectory = msgspec.structs.replace(kept.trajectory, segments=segments)
    return _encoder.encode(msgspec.structs.replace(kept, trajectory=trajectory))


def decode_kept(body: bytes) -> KeptRollout:
    """With the segments as the stream had them. Raises WireError for bytes that cannot be read."""
    try:
        kept = _decoder.decode(body)
    except UNDECODABLE as error:
        raise WireError(f"{len(body)} bytes are no kept rollout ({error})") from error
    if kept.schema != RECORD_SCHEMA:
        raise WireError(f"a kept rollout has schema {kept.schema}, this process reads {RECORD_SCHEMA}")
    segments = [_restored(segment) for segment in kept.trajectory.segments]
    return msgspec.structs.replace(kept, trajectory=msgspec.structs.replace(kept.trajectory, segments=segments))


def _condensed(segment: Segment) -> Segment:
    logprobs = b"".join(
        [segment.logprobs[4 * span.start : 4 * (span.start + span.length)] for span in segment.version_spans]
    )
    return msgspec.structs.replace(segment, loss_mask=b"", logprobs=logprobs, choices=None)


def _restored(segment: Segment) -> Segment:
    mask = sampled_mask(segment)
    logprobs = np.zeros(len(mask), dtype="<f4")
    logprobs[mask == 1] = unpack_logprobs(segment.logprobs)
    return msgspec.structs.replace(segment, loss_mask=mask.tobytes(), logprobs=logprobs.tobytes())
