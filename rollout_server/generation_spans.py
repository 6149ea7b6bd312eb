"""The span of drawing tokens for a call in a session: how many, and by which policy versions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from services.tracing import Span, Tracing
from services.wire.trajectory import VersionSpan

NAME = "rollout.generate"


def generating(tracing: Tracing, trace: str) -> AbstractContextManager[Span]:
    """Below the call that is being answered; where that is of no trace (an agent's own client), below the session's.

    `trace`: the context that the session was opened in.
    """
    return tracing.span(NAME, parent=tracing.current() or trace)


def note_drawn(span: Span, samples: Sequence[Sequence[VersionSpan]], **names: str) -> None:
    """`samples`: by which versions the tokens of each were drawn. `names`: of what they were drawn for, by kind."""
    spans = [each for sample in samples for each in sample]
    span.note(**names, samples=len(samples), tokens=sum(each.length for each in spans))
    if spans:
        versions = [each.version for each in spans]
        span.note(version=max(versions), oldest_version=min(versions))
