"""What a run folder says of its run: state, steps, success and size; removing it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from services.config.load import flat_settings
from services.host.files import LineTail
from services.host.run_folder import RunFolder, is_held
from services.policies.training.evaluation import interval
from services.wire.errors import UNDECODABLE, UsageError
from services.wire.run_metrics import EvaluationReport, StepMetrics, TrainerReport, decode_step_metrics

State = Literal["running", "done", "interrupted"]
"""Whether its `rollmesh up` runs, has written the summary, or ended before."""

ReportT = TypeVar("ReportT")


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `rollmesh runs --json`. Success: of the last batch, and of held-out problems; None before it is known."""

    path: str
    run_id: str
    state: State
    task: str
    engine: str
    seed: int
    step: int
    steps: int
    success: float | None
    success_before: float | None
    success_after: float | None
    success_interval_after: tuple[float, float] | None
    """At 95 %; None where the answers to each problem were not written down."""
    size_bytes: int
    began_at: float
    """Unix seconds."""


@dataclass(frozen=True)
class RunFiles:
    """What a run's files say. `settings`: by dotted name, as they were resolved."""

    folder: RunFolder
    run_id: str
    settings: Mapping[str, object]
    lines: list[StepMetrics]
    evaluation: EvaluationReport | None
    report: TrainerReport | None

    @property
    def name(self) -> str:
        return self.folder.root.name


def read_run(folder: RunFolder) -> RunFiles:
    """Raises UsageError where the folder's configuration cannot be read."""
    lines = [decode_step_metrics(line) for line in LineTail(folder.metrics).new_lines()]
    return RunFiles(
        folder=folder,
        run_id=folder.run_id.read_text(encoding="utf-8").strip(),
        settings=flat_settings(folder.config),
        lines=[line for line in lines if line is not None],
        evaluation=_read(folder.evaluation, EvaluationReport),
        report=_read(folder.trainer_report, TrainerReport),
    )


def _read(path: Path, kind: type[ReportT]) -> ReportT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE):
        return None


def listed(run: RunFiles) -> Listed:
    """The run in one line."""
    folder, settings = run.folder, run.settings
    done = folder.summary.exists()
    last = run.lines[-1] if run.lines else None
    labels = [str(task.get("name", task.get("task"))) for task in tasks_of(settings)]
    return Listed(
        path=str(folder.root),
        run_id=run.run_id,
        state="running" if is_held(folder) else "done" if done else "interrupted",
        task=", ".join(labels) or str(settings.get("task", "")),
        engine=str(settings.get("engine", "")),
        seed=_number(settings.get("seed")),
        step=0 if last is None else last.step,
        steps=_number(settings.get("steps")),
        success=None if last is None else last.success,
        success_before=None if run.evaluation is None else run.evaluation.success_before,
        success_after=None if run.evaluation is None else run.evaluation.success_after,
        success_interval_after=_interval(run.evaluation),
        size_bytes=size_of(folder.root),
        began_at=folder.run_id.stat().st_mtime,
    )


def tasks_of(settings: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The tables of `[[tasks]]`; none of a run of one task."""
    tables = settings.get("tasks")
    return [table for table in tables if isinstance(table, Mapping)] if isinstance(tables, list) else []


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def size_of(root: Path) -> int:
    """Bytes of the files in the folder. Files that go meanwhile are left out."""
    total = 0
    for path in root.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def _interval(report: EvaluationReport | None) -> tuple[float, float] | None:
    if report is None or not report.solved_after:
        return None
    found = interval(report.solved_after, report.samples, report.different)
    return found.low, found.high


def remove(folders: Sequence[RunFolder]) -> int:
    """Remove the folders and all in them; returns the bytes that are freed.

    Raises UsageError where files cannot be removed, and, before any is, for a run that runs.
    """
    for folder in folders:
        if is_held(folder):
            raise UsageError(f"{folder.root} is of a run that runs", "end it first (Ctrl-C)")
    freed = 0
    for folder in folders:
        freed += size_of(folder.root)
        try:
            shutil.rmtree(folder.root)
        except OSError as error:
            raise UsageError(f"cannot remove {error.filename} ({error.strerror})", "correct its permissions") from error
    return freed
