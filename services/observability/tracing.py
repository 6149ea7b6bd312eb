"""Distributed traces by OpenTelemetry, across processes by W3C Trace Context (`traceparent`).

    environment.group ──HTTP──► gateway ──► rollout server: POST …/turns ──► rollout.generate
                                                     │ `Trajectory.trace`
                                                     ▼ (a link: one step has many trajectories)
    trainer.batch ──► trainer.step, trainer.update ──HTTP──► weight bus: bus.stage, bus.commit ──HTTP──► rollout.commit

This module needs OpenTelemetry's API alone. Its SDK and exporter (`services.observability.otel`) are imported only where
traces are switched on (`services.config.traces`); without them every method here returns at once. Nothing global is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
"""The header of W3C Trace Context: `00-<trace>-<span>-<flags>`."""
NO_TRACE = "00-" + "0" * 32 + "-" + "0" * 16 + "-00"
"""A parent that is recorded nowhere, for work that belongs to no trace, whatever is current."""
Fact = str | int | float | bool
Kind = Literal["internal", "server", "client"]
ServiceKind = Literal["environment", "gateway", "rollout-server", "rewards", "trainer", "weight-bus", "dashboard"]
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_LOGGED = ("trace_id", "span_id")
_w3c = TraceContextTextMapPropagator()


class Span:
    """A piece of work that goes on; what is noted of one that is not recorded goes nowhere."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> str:
        """Its `traceparent`, for work elsewhere that belongs to it; empty where it has none."""
        return _traceparent(self._span.get_span_context())

    def note(self, **facts: Fact) -> None:
        """Record facts under `rollmesh.<name>`."""
        self._span.set_attributes(_named(facts))

    def note_call(self, method: str, route: str, status: int) -> None:
        """Record which HTTP call it was, and how it was answered."""
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes(
            {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        )
        if status >= 500:
            self._span.set_status(trace.StatusCode.ERROR)


_NOT_RECORDED = nullcontext(Span(trace.INVALID_SPAN))
"""Stands for work that is not traced; any number may use it at a time."""


class TracerSource(Protocol):
    """The SDK, as far as it is seen here."""

    def tracer(self) -> trace.Tracer: ...

    def close(self) -> None: ...


class Tracing:
    """One process's traces. Without a `source` they are switched off: nothing is recorded. May be used from any thread.

    A span is current in the `with` block that makes it, and in tasks that are started there. Used as a context manager it
    hands in, at its end, what is recorded.
    """

    def __init__(self, source: TracerSource | None = None) -> None:
        self._source = source
        self.on = source is not None

    def begin(self, name: str, *, kind: Kind = "internal") -> AbstractContextManager[Span]:
        """A span below the current one; where there is none, it begins a trace, if the ratio says so."""
        return _NOT_RECORDED if self._source is None else _recorded(self._source, name, None, kind)

    def span(self, name: str, *, parent: str = "", kind: Kind = "internal") -> AbstractContextManager[Span]:
        """A span below `parent` (a `traceparent`), else below the current one. Where that is not recorded, it is not."""
        if self._source is None:
            return _NOT_RECORDED
        context = _w3c.extract({TRACEPARENT: parent}, Context()) if parent else None
        if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
            return _NOT_RECORDED
        return _recorded(self._source, name, context, kind)

    def record(self, name: str, start_ns: int, end_ns: int, *, links: Iterable[str] = (), **facts: Fact) -> None:
        """A span below the current one of work that is done: from and to in nanoseconds since 1970.

        `links`: the contexts of what it was made from; empty ones are left out.
        """
        if self._source is None or not trace.get_current_span().get_span_context().trace_flags.sampled:
            return
        linked = [trace.Link(context) for each in links if (context := _context_of(each)).is_valid]
        span = self._source.tracer().start_span(name, start_time=start_ns, links=linked, attributes=_named(facts))
        span.end(end_ns)

    def current(self) -> str:
        """The `traceparent` of the current span; empty where there is none."""
        return "" if self._source is None else _traceparent(trace.get_current_span().get_span_context())

    @contextmanager
    def logged_under(self, parent: str) -> Iterator[None]:
        """What is logged in the block belongs to `parent` (a `traceparent`; empty: to no trace), whatever is current."""
        if self._source is None:
            yield
            return
        said = structlog.contextvars.get_contextvars()
        before = {name: said[name] for name in _LOGGED if name in said}
        structlog.contextvars.unbind_contextvars(*_LOGGED)
        try:
            with structlog.contextvars.bound_contextvars(**_logged(_context_of(parent))):
                yield
        finally:
            structlog.contextvars.bind_contextvars(**before)

    def headers(self) -> dict[str, str]:
        """What an HTTP call must say for its answer to belong to the current span."""
        current = self.current()
        return {TRACEPARENT: current} if current else {}

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._source is not None:
            self._source.close()


NO_TRACING = Tracing()


@contextmanager
def _recorded(source: TracerSource, name: str, context: Context | None, kind: Kind) -> Iterator[Span]:
    with source.tracer().start_as_current_span(name, context=context, kind=_KINDS[kind]) as span:
        with structlog.contextvars.bound_contextvars(**_logged(span.get_span_context())):
            yield Span(span)


def _context_of(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_w3c.extract({TRACEPARENT: traceparent}, Context())).get_span_context()


def _named(facts: dict[str, Fact]) -> dict[str, Fact]:
    return {f"rollmesh.{name}": value for name, value in facts.items()}


def _logged(context: trace.SpanContext) -> dict[str, str]:
    """What log lines of work in `context` say of it: nothing, where it is recorded nowhere."""
    if not context.trace_flags.sampled:
        return {}
    ids = (trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id))
    return dict(zip(_LOGGED, ids, strict=True))


def _traceparent(context: trace.SpanContext) -> str:
    if not context.is_valid:
        return ""
    ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
    return f"00-{ids}-{int(context.trace_flags):02x}"
