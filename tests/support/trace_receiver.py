"""A collector: takes OTLP over HTTP as any other does, and keeps what it is given."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class TakenSpan:
    """One span as it came. Ids are hexadecimal; `parent` is empty for a root. Times are nanoseconds since 1970."""

    service: str
    instance: str
    run: str
    name: str
    trace: str
    span: str
    parent: str
    facts: dict[str, Any]
    links: list[tuple[str, str]]
    start: int
    end: int


@dataclass
class TraceReceiver:
    """`endpoint`: where it listens. `requests`: how many came."""

    endpoint: str = ""
    requests: int = 0
    _spans: list[TakenSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, body: bytes) -> None:
        came = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.requests += 1
            for resource in came.resource_spans:
                about = _facts(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [_taken(about, span) for span in scope.spans]

    def spans(self, name: str | None = None) -> list[TakenSpan]:
        with self._lock:
            return [span for span in self._spans if name in (None, span.name)]

    def trace(self, trace: str) -> list[TakenSpan]:
        return [span for span in self.spans() if span.trace == trace]

    def way_up(self, span: TakenSpan) -> list[TakenSpan]:
        """The spans above it, the nearest first."""
        by_id = {each.span: each for each in self.trace(span.trace)}
        above = []
        while span.parent:
            span = by_id[span.parent]
            above.append(span)
        return above


@contextmanager
def receiving_traces() -> Iterator[TraceReceiver]:
    receiver = TraceReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    serving = threading.Thread(target=server.serve_forever, name="trace-receiver", daemon=True)
    serving.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        serving.join(5.0)


def _facts(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _taken(about: dict[str, Any], span: Any) -> TakenSpan:
    return TakenSpan(
        service=about["service.name"],
        instance=about["service.instance.id"],
        run=about["rollmesh.run"],
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        facts=_facts(span.attributes),
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
    )
