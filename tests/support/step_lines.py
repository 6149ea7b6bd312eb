"""Lines of metrics.jsonl, as far as they are told to the outside."""

from __future__ import annotations

import json

from trainer.metrics.exporter import StepLine


def step_line(step: int, **changes: object) -> bytes:
    """A step of a second, a quarter of which was waited."""
    fields: dict[str, object] = dict.fromkeys(StepLine.__struct_fields__, 0) | {
        "step": step,
        "version": step,
        "wait_ms": 250.0,
        "step_ms": 1000.0,
        "train_ms": 700.0,
        "staleness_histogram": {"0": 10, "1": 5},
        "dropped": {"late": 1},
        "effective_samples": None,
        "more": "than is told",
    }
    return json.dumps(fields | changes).encode()
