"""What the files of a run say of it: its settings, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from services.config.load import flat_settings
from services.dashboard.look.events import Sections
from services.dashboard.open_runs import OpenRun
from services.policies.placement.place import Placement
from services.wire.errors import UNDECODABLE, UsageError
from services.wire.run_metrics import EvaluationReport, StepMetrics, TrainerReport, decode_step_metrics

_LAST_BYTES = 1 << 16
"""Of metrics.jsonl that are read first: many times a usual line."""
_encode = msgspec.json.encode
_Read = TypeVar("_Read")


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is: settings that its numbers are read by. None where there is no run folder here. `unread`: why its
    settings cannot be read; None where they can."""

    name: str
    run_id: str
    task: str | None = None
    engine: str | None = None
    servers: int | None = None
    seed: int | None = None
    steps: int = 0
    k: int = 0
    began_at: float | None = None
    placement: Placement | None = None
    unread: str | None = None


class PartView(msgspec.Struct, frozen=True):
    """`services.policies.progress.phase.Part`."""

    name: str
    done: float
    total: int
    now: str


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """`services.policies.progress.phase.Phase`; `left_s`: seconds until the last step, where there is a pace."""

    name: str
    share: float
    of_start: bool
    parts: list[PartView]
    left_s: float | None


def about(run: OpenRun) -> About:
    """Reads the run's config.toml."""
    if run.folder is None:
        return About(name=run.name, run_id=run.run_id)
    try:
        settings = flat_settings(run.folder.config)
    except UsageError as error:
        placement = _read(run.folder.placement, Placement)
        return About(name=run.name, run_id=run.run_id, placement=placement, unread=str(error))
    return About(
        name=run.name,
        run_id=run.run_id,
        task=_text(settings.get("task")),
        engine=_text(settings.get("engine")),
        servers=_number(settings.get("servers")),
        seed=_number(settings.get("seed")),
        steps=_number(settings.get("steps")) or 0,
        k=_number(settings.get("k")) or 0,
        began_at=run.folder.config.stat().st_mtime,
        placement=_read(run.folder.placement, Placement),
    )


def ended_sections(run: OpenRun, about: About) -> Sections:
    """Of a run that does not run: its last step and its summary. Reads files."""
    folder = run.folder
    if folder is None:
        return {"live": b"false", "about": _encode(about)}
    line = last_step(folder.metrics)
    done = folder.summary.exists()
    share = min(1.0, line.step / about.steps) if line is not None and about.steps else 0.0
    phase = PhaseView(name="done" if done else "interrupted", share=share, of_start=False, parts=[], left_s=None)
    return {
        "live": b"false",
        "about": _encode(about),
        "line": _encode(line),
        "phase": _encode(phase),
        "summary": _encode(msgspec.json.decode(folder.summary.read_bytes())) if done else b"null",
        "evaluation_report": _encode(evaluation_of(folder.evaluation)),
        "report": _encode(_read(folder.trainer_report, TrainerReport)),
    }


def last_step(path: Path) -> StepMetrics | None:
    """The newest whole line of a metrics.jsonl, from its end; None before the first."""
    try:
        with path.open("rb") as file:
            size, back = file.seek(0, 2), _LAST_BYTES
            while True:
                file.seek(max(0, size - back))
                found = file.read(size - file.tell())
                whole = found[: found.rfind(b"\n") + 1]
                line = next(filter(None, map(decode_step_metrics, reversed(whole.splitlines()))), None)
                if line is not None or back >= size:
                    return line
                back *= 4
    except FileNotFoundError:
        return None


def evaluation_of(path: Path) -> EvaluationReport | None:
    """What an evaluation.json says; None where there is none that can be read."""
    return _read(path, EvaluationReport)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _read(path: Path, kind: type[_Read]) -> _Read | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE):
        return None
