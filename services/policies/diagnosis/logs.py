"""Findings of the logs of a run: out of memory, groups that are lost, and what ended one before its last step. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from services.policies.diagnosis.finding import Finding, error, warning

_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc|oom-kill",
    re.IGNORECASE,
)
_ERROR = re.compile(r"\[(?:error|critical)\s*\]|\"level\": ?\"(?:error|critical)\"|^rollmesh: |Traceback|^\w*Error: ")
_ALL_LOST = re.compile(r"the last \d+ groups were lost and none was played")
_GROUP_LOST = re.compile(r"^(?!.*cause(?:=|\": ?\")server\b).*group lost")
"""By its task: a server that ends takes its groups with it, and they are played again elsewhere. In JSON the event stands
behind its facts."""
LOG_BYTES = 64 << 10
"""How much of the end of each log is looked at."""
_MANY_LOST = 3
_LONGEST = 200
_FAILED = "rollmesh: "
_LAST_LINES = 3
"""Of a process that said why it ended: a library may have written something after it."""


_WHY = re.compile(r".*?(why=.*|\"why\".*)")


class _Failed(msgspec.Struct):
    """The same line where logs are JSON."""

    event: Literal["failed"]
    why: str


def last_words(text: str) -> str:
    """Why a process ended, as it said at the end of its log (`services.cli.fail`); the last line where it did not."""
    last = text.splitlines()[-_LAST_LINES:]
    for line in reversed(last):
        if line.startswith(_FAILED):
            return line.removeprefix(_FAILED)
        try:
            return msgspec.json.decode(line, type=_Failed).why
        except msgspec.MsgspecError:
            continue
    return last[-1] if last else ""


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
    lost = [line for line in logs.get("environment", "").splitlines() if _GROUP_LOST.search(line)]
    if len(lost) >= _MANY_LOST:
        yield warning(
            "groups-lost",
            f"the environment loses groups, {len(lost)} of them in the end of its log: nothing is learned from those",
            _WHY.sub(r"\1", lost[-1].strip())[:_LONGEST],
            "mend what is raised; where it is the policy's doing, return Ended(0.0, False): an exception loses the group",
        )


def of_interrupted(where: str, step: int, steps: int, logs: Mapping[str, str]) -> Iterator[Finding]:
    """A run that nobody runs any more, without a summary."""
    ended = last_words(logs.get("environment", ""))
    if _ALL_LOST.search(ended):
        yield error(
            "groups-lost",
            f"the environment lost group after group and gave the run up, at step {step} of {steps}",
            ended,
            f"mend the task (`rollmesh run-environment --trial` tries it), then go on: rollmesh up --resume {where}",
        )
        return
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
