"""Export of traces by OpenTelemetry's SDK. Imported only where traces are switched on; sets nothing global.

span ends ──► queue, bounded (the oldest are dropped when it is full) ──► a thread of its own ──► console | OTLP
the process ends ──► what is queued is handed in, within a deadline
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from services.config.traces import TraceSettings
from services.observability.tracing import ServiceKind

QUEUED_SPANS = 8192
_BATCH = 512
_EVERY_MS = 1000
EXPORT_WITHIN_S = 5.0
CLOSE_WITHIN_S = 3.0
_MOST_LINKS = 4096
"""Of a step: one for each group that it consumes."""
_log = structlog.get_logger()


class Exporting:
    """Makes the spans of one process (`services.observability.tracing`) and sends them where the settings say."""

    def __init__(self, settings: TraceSettings, kind: ServiceKind, run_id: str, instance: str) -> None:
        # A trainer's own traces are its steps, of which there are few.
        self._ratio = 1.0 if kind == "trainer" else settings.traces_ratio
        self._who = {
            "service.name": f"rollmesh-{kind}",
            "service.instance.id": instance,
            "service.version": version("rollmesh"),
            "rollmesh.run": run_id,
        }
        self._opening = threading.Lock()
        self._tracer: trace.Tracer | None = None
        self._provider: TracerProvider | None = None
        self._exporter = _Exporter(settings)

    def tracer(self) -> trace.Tracer:
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

    def close(self) -> None:
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
