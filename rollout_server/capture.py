"""Token capture: what one session's engine saw and drew, exactly, as the segments the trainer reads.

    environment tokens ──► mask 0, logprob 0, no span
    sampled tokens     ──► mask 1, the engine's logprob, a version span

Every sampled token is captured once, with the id that the engine drew: no text is ever encoded again. A context only
grows here, so a session is one segment; the list leaves room for contexts that break.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.wire.errors import RollmeshError
from services.wire.packed import pack_logprobs, pack_tokens
from services.wire.trajectory import Segment, VersionSpan


class CaptureError(RollmeshError):
    """An engine's answer contradicts itself: its tokens cannot be trained on."""

    code = "capture"


@dataclass(slots=True)
class _OpenSegment:
    """A segment under construction. `mask` is packed as it grows; positions in `spans` are absolute in the segment."""

    tokens: list[int] = field(default_factory=list)
    mask: bytearray = field(default_factory=bytearray)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[VersionSpan] = field(default_factory=list)
    break_reason: str | None = None

    def pack(self) -> Segment:
        return Segment(
            token_ids=pack_tokens(self.tokens),
            loss_mask=bytes(self.mask),
            logprobs=pack_logprobs(self.logprobs),
            version_spans=list(self.spans),
            break_reason=self.break_reason,
        )


class Capture:
    """The tokens of one session so far."""

    def __init__(self) -> None:
        self._closed: list[Segment] = []
        self._open = _OpenSegment()

    @property
    def context(self) -> list[int]:
        """The tokens of the open segment: what the next prompt extends. Not to be changed by the caller."""
        return self._open.tokens

    @property
    def sampled(self) -> int:
        """How many tokens the policy drew so far, in all segments."""
        closed = sum(span.length for segment in self._closed for span in segment.version_spans)
        return closed + sum(span.length for span in self._open.spans)

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not draw."""
        segment = self._open
        segment.tokens.extend(token_ids)
        segment.mask.extend(bytes(len(token_ids)))
        segment.logprobs.extend([0.0] * len(token_ids))

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[VersionSpan]) -> None:
        """Append drawn tokens. `versions` are spans over these tokens alone and must cover them without a gap.

        Raises CaptureError, and appends nothing, for lengths that differ, spans that do not cover, or a logprob that is
        not finite.
        """
        check_sampled(token_ids, logprobs, versions)
        segment = self._open
        offset = len(segment.tokens)
        segment.tokens.extend(token_ids)
        segment.mask.extend(b"\x01" * len(token_ids))
        segment.logprobs.extend(logprobs)
        for span in versions:
            _append_merged(segment.spans, VersionSpan(offset + span.start, span.length, span.version))

    def segments(self) -> list[Segment]:
        """The segments so far, packed, in order. Empty before the first token."""
        return [*self._closed, self._open.pack()] if self._open.tokens else list(self._closed)


def check_sampled(token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[VersionSpan]) -> None:
    """Raise CaptureError unless logprobs are finite, one a token, and `versions` cover the tokens without a gap."""
    if len(token_ids) != len(logprobs):
        raise CaptureError(f"the engine gave {len(token_ids)} tokens and {len(logprobs)} logprobs")
    if not all(map(math.isfinite, logprobs)):
        raise CaptureError("the engine gave a logprob that is not finite")
    position = 0
    for span in versions:
        if span.start != position or span.length <= 0:
            raise CaptureError(
                f"the engine gave a version span at {span.start} of length {span.length}, not {position}"
            )
        position += span.length
    if position != len(token_ids):
        raise CaptureError(f"the engine's version spans cover {position} of {len(token_ids)} tokens")


def _append_merged(spans: list[VersionSpan], span: VersionSpan) -> None:
    if spans:
        last = spans[-1]
        if last.version == span.version and last.start + last.length == span.start:
            spans[-1] = VersionSpan(last.start, last.length + span.length, span.version)
            return
    spans.append(span)
