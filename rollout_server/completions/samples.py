"""Collecting the samples of one prompt: deltas from the engine, read as they come, cut where a stop string ends an answer.

engine ──delta──► Sample: tokens, logprobs, versions ──reader──► piece of text, calls … ──► on_piece (a stream's chunk)
                    └── a stop string is complete ──► the sample ends with that token; what the engine sampled beyond it
                                                      is part of no answer
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rollout_server.engines.base import FinishReason, GenerationDelta, kept_of
from rollout_server.sessions.capture import CaptureError, check_sampled
from services.policies.continuation import joined_versions
from services.wire.trajectory import ExpertChoices, VersionSpan

Piece = TypeVar("Piece")
PieceOut = TypeVar("PieceOut", covariant=True)
TopLogprobs = list[tuple[int, float]]


class Reader(Protocol[PieceOut]):
    """Reads one answer as it grows. `stopped`: the stop string that ended it after `consumed` tokens."""

    @property
    def consumed(self) -> int: ...

    @property
    def stopped(self) -> str | None: ...

    def feed(self, token_ids: Sequence[int]) -> PieceOut: ...


@dataclass(slots=True)
class Sample(Generic[Piece]):
    """One answer being generated. `versions`: spans over its tokens. `kept`, `experts`: as `GenerationDelta` has them."""

    index: int
    reader: Reader[Piece]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    kept: list[bytes] | None = None
    experts: ExpertChoices | None = None
    finish_reason: FinishReason | None = None

    def add(self, delta: GenerationDelta) -> tuple[Piece, int]:
        """Add what was sampled; returns its text and how many of the tokens belong to the answer."""
        piece = self.reader.feed(delta.token_ids)
        offset, keep = len(self.token_ids), len(delta.token_ids)
        if delta.kept is not None and self.kept is None:
            self.kept = [b""] * offset
        self.finish_reason = delta.finish_reason
        if self.reader.stopped is not None:
            keep = min(keep, self.reader.consumed - offset)
            self.finish_reason = "stop"
        if self.kept is not None:
            self.kept += kept_of(delta)[:keep]
        self.experts = delta.experts if self.experts is None else self.experts.then(delta.experts)
        self.token_ids += delta.token_ids[:keep]
        self.logprobs += delta.logprobs[:keep]
        for span in delta.versions:
            length = min(span.length, keep - span.start)
            if length > 0:
                self.versions.append(span.over(offset + span.start, length))
        if delta.top_logprobs is not None:
            self.top_logprobs += delta.top_logprobs[:keep]
        return piece, keep

    def stop_reason(self, stop_token_ids: Sequence[int] | None) -> int | str | None:
        """The stop string, or the call's own stop token, that ended the answer; None for any other end."""
        if self.reader.stopped is not None:
            return self.reader.stopped
        last = self.token_ids[-1] if self.token_ids else None
        return last if self.finish_reason == "stop" and last in (stop_token_ids or ()) else None

    @property
    def policy_versions(self) -> list[tuple[int, int]]:
        """(version, offset of its first token), neighbours of one version as one."""
        return joined_versions((), 0, [(span.version, span.start) for span in self.versions])


async def collect_samples(
    deltas: AsyncGenerator[GenerationDelta, None],
    n: int,
    make_reader: Callable[[], Reader[Piece]],
    on_piece: Callable[[Sample[Piece], Piece, int], None] | None = None,
) -> list[Sample[Piece]]:
    """All `n` samples of a request whose deltas these are, whole and checked.

    `on_piece` is told of each growth: the sample, what it says, and by how many tokens it has grown. Raises CaptureError
    for an engine that contradicts itself, and whatever the engine raises.
    """
    samples = [Sample(index, make_reader()) for index in range(n)]
    left = n
    async with aclosing(deltas):
        async for delta in deltas:
            sample = samples[delta.index]
            if sample.finish_reason is not None:
                continue  # cut at a stop string: the engine goes on until its siblings are done
            piece, grown = sample.add(delta)
            left -= sample.finish_reason is not None
            if on_piece is not None:
                on_piece(sample, piece, grown)
            if not left:
                break
    if left:
        raise CaptureError(f"the engine ended {left} of {n} samples without saying so")
    for sample in samples:
        check_sampled(sample.token_ids, sample.logprobs, sample.versions)
    return samples
