"""The tokens of a batch, flat: all segments end to end, and who sampled which token.

    group 0                         group 1
    trajectory 0    trajectory 1    trajectory 2          S segments, T tokens, R version spans, N sampled tokens
    p p s s e s     p p s │ p s     p s s
        └─┘   └                     a span: neighbours of one version

Laid out once a batch, with few operations on all of it: operations of numpy on the handful of tokens that a segment often
has cost more than their arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.wire.packed import Float32Array, Int32Array, unpack_logprobs, unpack_tokens
from services.wire.trajectory import Segment
from trainer.algorithms.advantages.batch import Int64Array


@dataclass(frozen=True)
class FlatSegments:
    """`lengths` int64 `[S]`. `token_ids` int32 `[T]`; `logprobs` float32 `[T]`, the engine's, where it sampled.

    Of the spans, in their order, int64 `[R]`: `span_segment`, `span_start` (in its segment), `span_length`,
    `span_version`, `span_sampling`.
    """

    lengths: Int64Array
    token_ids: Int32Array
    logprobs: Float32Array
    span_segment: Int64Array
    span_start: Int64Array
    span_length: Int64Array
    span_version: Int64Array
    span_sampling: Int64Array

    @staticmethod
    def of(segments: Sequence[Segment]) -> FlatSegments:
        spans = [
            (number, span.start, span.length, span.version, span.sampling)
            for number, segment in enumerate(segments)
            for span in segment.version_spans
        ]
        return FlatSegments(
            np.array([len(segment.loss_mask) for segment in segments], dtype=np.int64),
            unpack_tokens(b"".join([segment.token_ids for segment in segments])),
            unpack_logprobs(b"".join([segment.logprobs for segment in segments])),
            *np.array(spans, dtype=np.int64).reshape(-1, 5).T,
        )

    @cached_property
    def begins(self) -> Int64Array:
        """`[S]`: where each begins among all tokens."""
        begins: Int64Array = np.cumsum(self.lengths) - self.lengths
        return begins

    @cached_property
    def places(self) -> Int64Array:
        """`[N]`: where among all tokens each sampled one stands, ascending."""
        starts = self.begins[self.span_segment] + self.span_start
        return ranges(starts, self.span_length)

    def spread(self, sampled: Float32Array, elsewhere: float = 0.0) -> Float32Array:
        """`[T]`: what the sampled tokens `[N]` have, `elsewhere` at the others."""
        whole = np.full(len(self.token_ids), elsewhere, dtype=np.float32)
        whole[self.places] = sampled
        return whole

    def sampled_tokens(self) -> Int64Array:
        """`[S]`: how many of each were sampled."""
        counted: Int64Array = np.bincount(self.span_segment, self.span_length, len(self.lengths)).astype(np.int64)
        return counted

    def of_several_versions(self) -> int:
        """How many segments hold tokens of more than one version."""
        segment, version = self.span_segment, self.span_version
        differ = (segment[1:] == segment[:-1]) & (version[1:] != version[:-1])
        return len(np.unique(segment[1:][differ]))


def ranges(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """`start … start + length − 1` of each pair, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: Int64Array = np.repeat(starts - ends + lengths, lengths) + np.arange(total)
    return found
