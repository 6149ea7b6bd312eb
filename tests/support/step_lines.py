"""Lines of metrics.jsonl."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from services.wire.run_metrics import StepMetrics


def step_metrics(step: int, **changes: object) -> StepMetrics:
    """A step of a second, a quarter of which was waited."""
    values: dict[str, object] = dict.fromkeys((field.name for field in fields(StepMetrics)), 0) | {
        "step": step,
        "version": step,
        "epoch": 1,
        "packed_ahead": False,
        "wait_ms": 250.0,
        "step_ms": 1000.0,
        "train_ms": 700.0,
        "response_lengths": {},
        "staleness_histogram": {"0": 10, "1": 5},
        "dropped": {"late": 1},
        "components": {},
        "tasks": {},
        "warnings": {},
        "figures": {},
        "teacher_kl": None,
        "effective_samples": None,
        "update_state": None,
    }
    return msgspec.convert(values | changes, StepMetrics)


def step_line(step: int, **changes: object) -> bytes:
    return msgspec.json.encode(step_metrics(step, **changes))
