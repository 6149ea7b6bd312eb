"""Structured logging for every process of the mesh: one line an event, on standard error, JSON by switch."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure_logging(service: str, *, run_id: str | None = None) -> None:
    """Set structlog up for this process. `ROLLMESH_LOG_JSON=1` switches to JSON, `ROLLMESH_LOG_LEVEL` sets the level."""
    level = logging.getLevelNamesMapping().get(os.environ.get("ROLLMESH_LOG_LEVEL", "INFO").upper(), logging.INFO)
    as_json = os.environ.get("ROLLMESH_LOG_JSON") == "1"
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service, **({"run": run_id} if run_id else {}))
