"""Traces: which work belongs together, across processes, by W3C context (`traceparent`).

    environment.group ──HTTP──► gateway ──► rollout server: POST …/turns ──► rollout.generate
                                                     │ `Trajectory.trace`
                                                     ▼ (a link: one step has many trajectories)
    trainer.batch ──► trainer.step, trainer.update ──HTTP──► weight bus: bus.stage, bus.commit ──HTTP──► rollout.commit

This module is what all rooms see of it. Nothing of OpenTelemetry is imported unless traces are switched on
(`services.config.traces`); without them every method here answers at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Literal

TRACEPARENT = "traceparent"
"""The header of W3C Trace Context: `00-<trace>-<span>-<flags>`."""
NO_TRACE = "00-" + "0" * 32 + "-" + "0" * 16 + "-00"
"""A parent that is recorded nowhere, for work that belongs to no trace, whatever is current."""
Fact = str | int | float | bool
Kind = Literal["internal", "server", "client"]
ServiceKind = Literal["environment", "gateway", "rollout-server", "rewards", "trainer", "weight-bus"]


class Span:
    """A piece of work that goes on. This one is recorded nowhere."""

    @property
    def context(self) -> str:
        """Its `traceparent`, for work elsewhere that belongs to it; empty where it has none."""
        return ""

    def note(self, **facts: Fact) -> None:
        """Record facts under `rollmesh.<name>`."""

    def note_call(self, method: str, route: str, status: int) -> None:
        """Record which HTTP call it was, and how it was answered."""


class NoSpan(Span, AbstractContextManager[Span]):
    """Stands for work that is not traced; any number may use one at a time."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


NO_SPAN = NoSpan()


class Tracing:
    """One process's traces. This one is switched off: it records nothing, and costs a call.

    A span is current in the `with` block that makes it, and in tasks that are started there. Used as a context manager it
    hands in, at its end, what is recorded.
    """

    on: bool = False

    def begin(self, name: str, *, kind: Kind = "internal") -> AbstractContextManager[Span]:  # noqa: ARG002 - it ignores all
        """A span below the current one; where there is none, it begins a trace, if the ratio says so."""
        return NO_SPAN

    def span(  # as above, it ignores all
        self,
        name: str,  # noqa: ARG002
        *,
        parent: str = "",  # noqa: ARG002
        kind: Kind = "internal",  # noqa: ARG002
    ) -> AbstractContextManager[Span]:
        """A span below `parent` (a `traceparent`), else below the current one. Where that is not recorded, it is not."""
        return NO_SPAN

    def record(self, name: str, start_ns: int, end_ns: int, *, links: Iterable[str] = (), **facts: Fact) -> None:
        """A span below the current one of work that is done: from and to in nanoseconds since 1970.

        `links`: the contexts of what it was made from; empty ones are left out.
        """

    def current(self) -> str:
        """The `traceparent` of the current span; empty where there is none."""
        return ""

    def logged_under(self, parent: str) -> AbstractContextManager[None]:  # noqa: ARG002 - as above
        """What is logged in the block belongs to `parent` (a `traceparent`; empty: to no trace), whatever is current."""
        return nullcontext()

    def headers(self) -> dict[str, str]:
        """What an HTTP call must say for its answer to belong to the current span."""
        return {}

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


NO_TRACING = Tracing()
