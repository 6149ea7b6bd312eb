"""Checkpoints kept for their evaluation: of a version that is evaluated, until a better one is known.

checkpoints/step-00000040       goes when newer ones are there
checkpoints/evaluated-00000040  the same files (hard links): stays while it waits for its evaluation, or is the best
evaluations.json                in the run folder: what was found
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.host.files import appearing
from services.host.run_folder import RunFolder
from services.policies.training.evaluation import best_of
from services.run_store.status import write_evaluations
from services.wire.errors import UsageError
from services.wire.rollout_api import Evaluation, Evaluations
from services.wire.run_metrics import EvaluationReport, TrainerReport
from trainer.checkpoint.checkpoint import PREFIX, path_of

_PREFIX = "evaluated-"


def keep_for_evaluation(folder: Path, version: int) -> None:
    """Keep the checkpoint of `version`, which was just written. Raises OSError."""
    source, target = path_of(folder, version), _path(folder, version)
    if target.exists():
        return
    with appearing(target) as making:
        for file in source.iterdir():
            try:
                os.link(file, making / file.name)
            except OSError:
                # A file system without hard links.
                shutil.copy2(file, making / file.name)


def heed(folder: Path, file: Path, evaluations: Sequence[Evaluation], every: int, *, last: bool = False) -> None:
    """Write down what was found, and let go of the kept checkpoints that are neither the best nor still to be evaluated.

    `folder`: of checkpoints; `file`: evaluations.json; `every`: versions between evaluations; `last`: no more will come.
    Raises UsageError on a full disk.
    """
    write_evaluations(file, evaluations)
    best, newest = _best(folder, evaluations, every), max((each.due for each in evaluations), default=-1)
    for version in _versions(folder):
        if version != best and (last or version // every * every <= newest):
            shutil.rmtree(_path(folder, version), ignore_errors=True)


def _best(folder: Path, evaluations: Sequence[Evaluation], every: int) -> int | None:
    """The kept version whose evaluation is the best. It may be above the one that was due: not all are published."""
    found = {each.due: each.success for each in evaluations}
    kept = [(version, version // every * every) for version in _versions(folder)]
    return best_of([(version, found[due]) for version, due in kept if due in found])


def best_checkpoint(run: RunFolder, every: int) -> int:
    """The version of the checkpoint whose evaluation is the best; the last one, where it is no worse.

    Raises UsageError where none was evaluated.
    """
    evaluations: Sequence[Evaluation] = ()
    if run.evaluations.exists():
        evaluations = Evaluations.model_validate_json(run.evaluations.read_bytes()).evaluations
    best = _best(run.checkpoints, evaluations, every) if every else None
    after, final = None, final_version(run)
    if run.evaluation.exists():
        after = msgspec.json.decode(run.evaluation.read_bytes(), type=EvaluationReport).success_after
    found = {each.due: each.success for each in evaluations}
    if final is not None and after is not None and (best is None or after >= found[best // every * every]):
        return final
    if best is None:
        raise UsageError(f"of {run.root} no checkpoint was evaluated", "set evaluation.every, or name a version")
    return best


def final_version(folder: RunFolder) -> int | None:
    """Of a run that has ended: that of `checkpoints/final`; None of one that has not."""
    if not folder.trainer_report.exists() or not (folder.checkpoints / "final").exists():
        return None
    return msgspec.json.decode(folder.trainer_report.read_bytes(), type=TrainerReport).final_version


def find(folder: Path, version: int) -> Path:
    """The checkpoint of `version`: kept for its evaluation, or one of the newest."""
    kept = _path(folder, version)
    return kept if kept.exists() else path_of(folder, version)


def _versions(folder: Path) -> list[int]:
    found = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    return sorted(int(version) for version in found if version.isdigit())


def _path(folder: Path, version: int) -> Path:
    return folder / path_of(folder, version).name.replace(PREFIX, _PREFIX)
