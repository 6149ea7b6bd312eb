"""Opens a process's traces as its settings want them: switched off, or exported by OpenTelemetry's SDK."""

from __future__ import annotations

from services.config.traces import TraceSettings
from services.observability.tracing import NO_TRACING, ServiceKind, Tracing
from services.wire.errors import UsageError
from services.wire.extras import install


def open_tracing(settings: TraceSettings, kind: ServiceKind, run_id: str, instance: str) -> Tracing:
    """Traces as `settings` want them. `instance`: which of the services of its kind this process is.

    No thread is started before the first span: an engine may yet fork. Raises UsageError where they are switched on and
    OpenTelemetry's SDK is not installed.
    """
    if settings.traces == "off":
        return NO_TRACING
    check_installed(settings)
    from services.observability.otel import Exporting

    return Tracing(Exporting(settings, kind, run_id, instance))


def check_installed(settings: TraceSettings) -> None:
    """Raise UsageError where traces are switched on and what makes them is missing."""
    if settings.traces == "off":
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401 - only to see that they are there
    except ModuleNotFoundError as error:
        raise UsageError(
            f"traces are switched on (telemetry.traces = {settings.traces!r}), OpenTelemetry's SDK is not installed",
            f"{install('traces')}, or switch them off",
        ) from error
