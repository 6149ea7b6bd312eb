"""Traces by OpenTelemetry. Imported only where traces are switched on; sets nothing global and patches nothing.

span ends ──► queue, bounded (the oldest are dropped when it is full) ──► a thread of its own ──► console | OTLP
the process ends ──► what is queued is handed in, within a deadline
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from types import TracebackType

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.config.traces import TraceSettings
from services.observability.tracing import NO_SPAN, TRACEPARENT, Fact, Kind, ServiceKind, Span, Tracing

QUEUED_SPANS = 8192
_BATCH = 512
_EVERY_MS = 1000
EXPORT_WITHIN_S = 5.0
CLOSE_WITHIN_S = 3.0
_MOST_LINKS = 4096
"""Of a step: one for each group that it consumes."""
_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_LOGGED = ("trace_id", "span_id")
_log = structlog.get_logger()


class OtelTracing(Tracing):
    """See `Tracing`. May be used from any thread."""

    on = True

    def __init__(self, settings: TraceSettings, kind: ServiceKind, run_id: str, instance: str) -> None:
        # A trainer's own traces are its steps, of which there are few.
        self._ratio = 1.0 if kind == "trainer" else settings.traces_ratio
        self._who = {
            "service.name": f"rollmesh-{kind}",
            "service.instance.id": instance,
            "service.version": version("rollmesh"),
            "rollmesh.run": run_id,
        }
        self._w3c = TraceContextTextMapPropagator()
        self._opening = threading.Lock()
        self._tracer: trace.Tracer | None = None
        self._provider: TracerProvider | None = None
        self._exporter = _Exporter(settings)

    def begin(self, name: str, *, kind: Kind = "internal") -> AbstractContextManager[Span]:
        return self._recorded(name, None, kind)

    def span(self, name: str, *, parent: str = "", kind: Kind = "internal") -> AbstractContextManager[Span]:
        context = self._w3c.extract({TRACEPARENT: parent}, Context()) if parent else None
        if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
            return NO_SPAN
        return self._recorded(name, context, kind)

    def record(self, name: str, start_ns: int, end_ns: int, *, links: Iterable[str] = (), **facts: Fact) -> None:
        if not trace.get_current_span().get_span_context().trace_flags.sampled:
            return
        linked = [trace.Link(context) for each in links if (context := self._context_of(each)).is_valid]
        span = self._open().start_span(name, start_time=start_ns, links=linked, attributes=_named(facts))
        span.end(end_ns)

    def current(self) -> str:
        return _traceparent(trace.get_current_span().get_span_context())

    @contextmanager
    def logged_under(self, parent: str) -> Iterator[None]:
        said = structlog.contextvars.get_contextvars()
        before = {name: said[name] for name in _LOGGED if name in said}
        structlog.contextvars.unbind_contextvars(*_LOGGED)
        try:
            with structlog.contextvars.bound_contextvars(**_logged(self._context_of(parent))):
                yield
        finally:
            structlog.contextvars.bind_contextvars(**before)

    def headers(self) -> dict[str, str]:
        current = self.current()
        return {TRACEPARENT: current} if current else {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hand in what is queued. A collector that does not answer is not waited for beyond `CLOSE_WITHIN_S`."""
        provider = self._provider
        if provider is None:
            return
        # The library's own shutdown may wait for half a minute.
        closing = threading.Thread(target=provider.shutdown, name="traces-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S)
        if closing.is_alive():
            self._exporter.give_up()
            _log.warning("traces are lost: they were not taken in time", within_s=CLOSE_WITHIN_S)

    @contextmanager
    def _recorded(self, name: str, context: Context | None, kind: Kind) -> Iterator[Span]:
        with self._open().start_as_current_span(name, context=context, kind=_KINDS[kind]) as span:
            with structlog.contextvars.bound_contextvars(**_logged(span.get_span_context())):
                yield _OtelSpan(span)

    def _context_of(self, traceparent: str) -> trace.SpanContext:
        return trace.get_current_span(self._w3c.extract({TRACEPARENT: traceparent}, Context())).get_span_context()

    def _open(self) -> trace.Tracer:
        """The tracer; made, with its thread, for the first span."""
        if self._tracer is not None:
            return self._tracer
        with self._opening:
            if self._tracer is None:
                self._provider = provider = TracerProvider(
                    sampler=ParentBased(TraceIdRatioBased(self._ratio)),
                    resource=Resource.create(self._who),
                    shutdown_on_exit=False,
                    span_limits=SpanLimits(max_links=_MOST_LINKS),
                )
                provider.add_span_processor(
                    BatchSpanProcessor(
                        self._exporter,
                        max_queue_size=QUEUED_SPANS,
                        schedule_delay_millis=_EVERY_MS,
                        max_export_batch_size=_BATCH,
                    )
                )
                self._tracer = provider.get_tracer("rollmesh", version("rollmesh"))
            return self._tracer


class _OtelSpan(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> str:
        return _traceparent(self._span.get_span_context())

    def note(self, **facts: Fact) -> None:
        self._span.set_attributes(_named(facts))

    def note_call(self, method: str, route: str, status: int) -> None:
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes(
            {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        )
        if status >= 500:
            self._span.set_status(trace.StatusCode.ERROR)


class _Exporter(SpanExporter):
    """One that can be given up while it tries: what is still queued then goes nowhere, without a word for each batch."""

    def __init__(self, settings: TraceSettings) -> None:
        self._inner = _exporter(settings)
        self._ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE if self._ended else self._inner.export(spans)

    def give_up(self) -> None:
        if not self._ended:
            self._ended = True
            self._inner.shutdown()

    shutdown = give_up


def _exporter(settings: TraceSettings) -> SpanExporter:
    if settings.traces == "console":
        as_line: Callable[[ReadableSpan], str] = lambda span: f"{span.to_json(indent=None)}\n"  # noqa: E731
        return ConsoleSpanExporter(out=sys.stderr, formatter=as_line)
    return OTLPSpanExporter(endpoint=settings.traces_endpoint, timeout=EXPORT_WITHIN_S)


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
