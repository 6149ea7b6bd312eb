"""Kept rollouts as decoded samples: what terminals and logging backends show of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from services.run_store.rollouts.record import KeptRollout
from services.run_store.rollouts.search import Found, RolloutReader, Search
from services.run_store.rollouts.tokens import UNKNOWN
from services.wire.packed import unpack_tokens
from services.wire.run_metrics import Sample, SampledSegment, SampledSpan
from services.wire.trajectory import Segment


def samples_of(reader: RolloutReader, found: Iterable[Found]) -> list[Sample]:
    """The rollouts of a list, decoded. Raises UsageError where the file cannot be read, WireError for what is in it."""
    kept = [reader.kept(each.id) for each in found]
    ids = [unpack_tokens(segment.token_ids) for one in kept for segment in one.trajectory.segments]
    tokens = np.unique(np.concatenate(ids)).tolist() if ids else []
    pieces = reader.pieces(tokens)
    return [as_sample(one, pieces) for one in kept]


def newest_sample(reader: RolloutReader) -> Sample | None:
    """The rollout that was kept last; None before the first."""
    return next(iter(samples_of(reader, reader.search(Search(limit=1)).rollouts)), None)


def samples_of_step(reader: RolloutReader, step: int, most: int) -> list[Sample]:
    """The first that were kept of a step, `most` at most."""
    wanted = Search(step=(step, step), descending=False, limit=most)
    return samples_of(reader, reader.search(wanted).rollouts)


def as_sample(kept: KeptRollout, pieces: Mapping[int, bytes]) -> Sample:
    """`pieces`: what its tokens stand for."""
    one = kept.trajectory
    return Sample(
        step=kept.step,
        group=one.group_id,
        ordinal=one.group_ordinal,
        member=one.member,
        task=one.task,
        server=one.server_id,
        reward=one.reward,
        versions=sorted({span.version for segment in one.segments for span in segment.version_spans}),
        segments=[_segment(segment, pieces) for segment in one.segments],
        tokens=one.sampled_tokens(),
        components=one.reward_components,
    )


def _segment(segment: Segment, pieces: Mapping[int, bytes]) -> SampledSegment:
    ids = unpack_tokens(segment.token_ids).tolist()
    spans = [
        SampledSpan(span.version, _text(ids[span.start : span.start + span.length], pieces))
        for span in segment.version_spans
    ]
    return SampledSegment(_text(ids, pieces), spans, segment.break_reason)


def _text(ids: Sequence[int], pieces: Mapping[int, bytes]) -> str:
    unknown = UNKNOWN.encode()
    return b"".join([pieces.get(token, unknown) for token in ids]).decode("utf-8", "replace")
