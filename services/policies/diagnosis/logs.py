"""Findings of the logs of a run's processes: out of memory, and what ended a run that did not reach its last step. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from services.policies.diagnosis.finding import Finding, error, warning

_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc|oom-kill",
    re.IGNORECASE,
)
_ERROR = re.compile(r"\[(?:error|critical)\s*\]|\"level\": ?\"(?:error|critical)\"|^rollmesh: |Traceback|^\w*Error: ")
_LONGEST = 200


def of_logs(logs: Mapping[str, str]) -> Iterator[Finding]:
    """`logs`: process → the end of its log."""
    for process, text in sorted(logs.items()):
        line = _last(text, _MEMORY)
        if line is not None:
            yield error(
                "out-of-memory",
                f"{process} ran out of memory",
                line,
                "of a trainer: fewer trainer.micro_batch_tokens, checkpointing, adapters (`rollmesh memory`); of an "
                "engine: fewer rollout.max_running, a smaller KV cache (docs/memory.md)",
            )


def of_interrupted(where: str, step: int, steps: int, logs: Mapping[str, str]) -> Iterator[Finding]:
    """A run that nobody runs any more, without a summary."""
    said = [(process, line) for process, text in sorted(logs.items()) if (line := _last(text, _ERROR)) is not None]
    seen = "; ".join(f"{process}: {line}" for process, line in said[:2]) or "no error is in its logs: it was stopped"
    yield warning(
        "run-failed",
        f"the run ended at step {step} of {steps}",
        seen,
        f"mend what is said, then go on with it: rollmesh up --resume {where}",
    )


def _last(text: str, pattern: re.Pattern[str]) -> str | None:
    """The last line with the pattern, cut."""
    line = next((line for line in reversed(text.splitlines()) if pattern.search(line)), None)
    return None if line is None else line.strip()[:_LONGEST]
