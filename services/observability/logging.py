"""Structured logging for every process of the mesh: one line an event, on standard error, JSON by switch.

our own events ────────────┐                          service, run, and what is bound where work begins:
other libraries' (logging) ┴─► the same fields ─► line   group, session, version, engine, trace_id, span_id
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from types import TracebackType

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_FOREIGN_LEVEL = logging.WARNING
"""Of what other libraries say, unless more is asked for."""


def configure_logging(service: str, *, run_id: str | None = None) -> None:
    """Set logging up for this process. `ROLLMESH_LOG_JSON=1` switches to JSON, `ROLLMESH_LOG_LEVEL` sets the level."""
    level = logging.getLevelNamesMapping().get(os.environ.get("ROLLMESH_LOG_LEVEL", "INFO").upper(), logging.INFO)
    as_json = logs_json(os.environ)
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    fields: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Named({"service": service, **({"run": run_id} if run_id else {})}),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*fields, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    made: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
    pre = [_named_by_logger, *fields]
    _take_foreign(structlog.stdlib.ProcessorFormatter(processors=made, foreign_pre_chain=pre), level)
    if as_json:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        # vLLM would write lines of its own making past us.
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def logs_json(environ: Mapping[str, str]) -> bool:
    """Whether every line on standard error is to be a JSON object."""
    return environ.get("ROLLMESH_LOG_JSON") == "1"


class _Named:
    """Adds what is the same in all lines of a process, in its threads too."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        return {**self._names, **event}


class _Foreign(logging.StreamHandler):  # type: ignore[type-arg]
    """Takes what other libraries log."""


def _take_foreign(formatter: logging.Formatter, level: int) -> None:
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _Foreign)]:
        root.removeHandler(handler)
    ours = _Foreign(sys.stderr)
    ours.setFormatter(formatter)
    root.addHandler(ours)
    root.setLevel(max(level, _FOREIGN_LEVEL) if level > logging.DEBUG else level)


def _named_by_logger(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    return event if record is None else {"logger": record.name, **event}


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    structlog.get_logger().critical("uncaught", exc_info=(kind, error, trace))
