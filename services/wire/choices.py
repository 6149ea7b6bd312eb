"""An engine's choices, apart from their trajectory: in the run's blob store, while the stream entry only names them.

    trajectory with choices ──detach──► trajectory  ──► stream entry, with the blob's reference
                                └─────► blob        ──► blob store          ──attach──► trajectory with choices

They may be many times as large as the tokens that they belong to.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from services.wire.errors import UNDECODABLE, WireError
from services.wire.packed import unpack_experts, unpack_kept, unpack_mask, unpack_tokens
from services.wire.trajectory import Segment, SegmentChoices, Trajectory

CHOICES_SCHEMA = 1
_DIGEST_BYTES = 16


class BlobError(WireError):
    """The choices that a stream entry names are missing, or are not what it names."""

    code = "blob"


class TrajectoryChoices(msgspec.Struct, frozen=True):
    """`segments`: of each segment of trajectory `trajectory_id`, in their order."""

    schema: int
    trajectory_id: str
    segments: list[SegmentChoices | None]


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """What a stream entry says of a blob. `name`: in the run's blob store; empty for one that was too large to be written.

    `digest`: 32 hexadecimal digits, BLAKE2b of its bytes; `size`: how many.
    """

    name: str
    digest: str
    size: int


_choices = msgspec.msgpack.Decoder(TrajectoryChoices)
_refs = msgspec.msgpack.Decoder(BlobRef)


def detach(trajectory: Trajectory) -> tuple[Trajectory, bytes | None]:
    """The trajectory without choices, and these as a blob; None where it has none."""
    if all(segment.choices is None for segment in trajectory.segments):
        return trajectory, None
    blob = TrajectoryChoices(
        CHOICES_SCHEMA, trajectory.trajectory_id, [segment.choices for segment in trajectory.segments]
    )
    bare = [msgspec.structs.replace(segment, choices=None) for segment in trajectory.segments]
    return msgspec.structs.replace(trajectory, segments=bare), msgspec.msgpack.encode(blob)


def reference(trajectory_id: str, blob: bytes, most_bytes: int) -> BlobRef:
    """What the entry of this trajectory says of its blob, which is written where it has at most `most_bytes`."""
    digest = hashlib.blake2b(blob, digest_size=_DIGEST_BYTES).hexdigest()
    name = f"{trajectory_id}:{digest}" if len(blob) <= most_bytes else ""
    return BlobRef(name, digest, len(blob))


def read_reference(packed: bytes) -> BlobRef:
    """Raises BlobError for bytes that are none."""
    try:
        return _refs.decode(packed)
    except UNDECODABLE as error:
        raise BlobError(f"a reference of {len(packed)} bytes to a blob cannot be read ({error})") from error


def attach(trajectory: Trajectory, packed: bytes, blob: bytes | None) -> Trajectory:
    """The trajectory with the choices that its stream entry refers to as `packed`.

    `blob`: what the store has under that name. Raises BlobError, saying why, where it is missing, or is not of this
    trajectory.
    """
    ref = read_reference(packed)
    if not ref.name:
        raise BlobError(f"its engine's choices were not kept: {ref.size} bytes are more than rollout.blob_mib allows")
    if blob is None:
        raise BlobError(f"its engine's choices ({ref.size} bytes) are not in the blob store")
    if hashlib.blake2b(blob, digest_size=_DIGEST_BYTES).hexdigest() != ref.digest:
        raise BlobError(f"its engine's choices are other bytes than were written ({len(blob)} for {ref.size})")
    try:
        choices = _choices.decode(blob)
    except UNDECODABLE as error:
        raise BlobError(f"its engine's choices cannot be read ({error})") from error
    if choices.schema != CHOICES_SCHEMA:
        raise BlobError(f"its engine's choices have schema {choices.schema}, this process reads {CHOICES_SCHEMA}")
    if choices.trajectory_id != trajectory.trajectory_id or len(choices.segments) != len(trajectory.segments):
        raise BlobError(
            f"its engine's choices are those of {len(choices.segments)} segments of trajectory {choices.trajectory_id}"
        )
    pairs = zip(trajectory.segments, choices.segments, strict=True)
    segments = [msgspec.structs.replace(segment, choices=each) for segment, each in pairs]
    return msgspec.structs.replace(trajectory, segments=segments)


def check_kept(segment: Segment, vocabulary: int) -> None:
    """Raise BlobError unless the kept tokens of a segment that has choices are ids below `vocabulary`, as many as the
    counts say, and each sampled token is among its own."""
    choices = segment.choices
    if choices is None or not choices.kept_counts:
        return
    if len(choices.kept_counts) % 4 or len(choices.kept_ids) % 4:
        raise BlobError("its kept tokens end in the middle of an element")
    counts, ids = unpack_kept(choices.kept_counts).astype(np.int64), unpack_kept(choices.kept_ids)
    sampled = unpack_tokens(segment.token_ids)[unpack_mask(segment.loss_mask) == 1]
    if len(counts) != len(sampled) or int(counts.sum()) != len(ids):
        what = f"it has {len(counts)} counts of kept tokens for {len(sampled)} sampled ones"
        raise BlobError(f"{what}, and {len(ids)} kept tokens where they say {int(counts.sum())}")
    if len(ids) and int(ids.max()) >= vocabulary:
        raise BlobError(f"it has a kept token outside 0 … {vocabulary - 1}")
    itself = np.zeros(len(counts), dtype=np.bool_)
    owner = np.repeat(np.arange(len(counts)), counts)
    itself[owner[ids == sampled[owner]]] = True
    if not itself[counts > 0].all():
        raise BlobError("it has a sampled token that is not among those that were kept")


def check_experts(segment: Segment, layers: int, top: int, experts: int) -> None:
    """Raise BlobError unless the experts of a segment that has choices are those of `layers` layers which choose `top` of
    so many `experts`, for each of its tokens."""
    choices = None if segment.choices is None else segment.choices.experts
    if choices is None:
        return
    if (choices.layers, choices.top) != (layers, top):
        what = f"its engine chose {choices.top} experts in each of {choices.layers} layers"
        raise BlobError(f"{what}, the model chooses {top} in each of {layers}")
    try:
        found = unpack_experts(choices.packed, layers, top, choices.itemsize)
    except ValueError as error:
        raise BlobError(f"its experts cannot be read: {error}") from error
    if len(found) != len(segment.loss_mask):
        raise BlobError(f"it has the experts of {len(found)} tokens, and {len(segment.loss_mask)} tokens")
    if len(found) and int(found.max()) >= experts:
        raise BlobError(f"it has an expert outside 0 … {experts - 1}")


def without_experts(trajectory: Trajectory) -> Trajectory:
    """The same, without what is known of its experts."""
    segments = [
        segment
        if segment.choices is None or segment.choices.experts is None
        else msgspec.structs.replace(segment, choices=msgspec.structs.replace(segment.choices, experts=None))
        for segment in trajectory.segments
    ]
    return msgspec.structs.replace(trajectory, segments=segments)
