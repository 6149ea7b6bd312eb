"""Checkpoints that are kept for their evaluation: until it is there, and for good where it is the best."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.host.run_folder import RunFolder
from services.wire.errors import UsageError
from services.wire.run_metrics import EvaluationReport
from tests.support.evaluations import evaluation
from trainer.checkpoint.checkpoint import path_of
from trainer.checkpoint.evaluated import best_checkpoint, find, heed, keep_for_evaluation

EVERY = 10


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """With checkpoints of versions 10, 21, 30, 40 that were kept for their evaluation; of the first two nothing else is
    left."""
    folder = RunFolder(tmp_path)
    for version in (10, 21, 30, 40):
        made = path_of(folder.checkpoints, version)
        made.mkdir(parents=True)
        (made / "model.safetensors").write_text(f"weights {version}")
        keep_for_evaluation(folder.checkpoints, version)
    for version in (10, 21):
        (path_of(folder.checkpoints, version) / "model.safetensors").unlink()
        path_of(folder.checkpoints, version).rmdir()
    return folder


def kept(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob("evaluated-*"))


def test_the_best_stays_and_what_waits_stays(run: RunFolder) -> None:
    told = [evaluation(10, 0.4), evaluation(20, 0.9), evaluation(30, 0.6)]
    heed(run.checkpoints, run.evaluations, told, EVERY)
    # 21 is the checkpoint of the evaluation that was due at 20: not every version is published.
    assert kept(run) == ["evaluated-00000021", "evaluated-00000040"]
    assert (find(run.checkpoints, 21) / "model.safetensors").read_text() == "weights 21"
    assert find(run.checkpoints, 30) == path_of(run.checkpoints, 30)
    assert best_checkpoint(run, EVERY) == 21


def test_at_the_end_only_the_best_stays(run: RunFolder) -> None:
    heed(run.checkpoints, run.evaluations, [evaluation(10, 0.4), evaluation(30, 0.4)], EVERY, last=True)
    assert kept(run) == ["evaluated-00000010"]
    assert best_checkpoint(run, EVERY) == 10


@pytest.mark.parametrize(("after", "best"), [(0.8, 21), (0.9, 57)])
def test_the_last_policy_is_the_best_where_it_is_no_worse(run: RunFolder, after: float, best: int) -> None:
    heed(run.checkpoints, run.evaluations, [evaluation(20, 0.9)], EVERY, last=True)
    (run.checkpoints / "final").mkdir()
    run.trainer_report.write_bytes(_report(57))
    run.evaluation.write_bytes(msgspec.json.encode(EvaluationReport(0.1, after, 1.0, 1.0, 4)))
    assert best_checkpoint(run, EVERY) == best


def test_a_run_without_evaluations_has_no_best(run: RunFolder) -> None:
    with pytest.raises(UsageError, match="no checkpoint was evaluated"):
        best_checkpoint(run, 0)


def _report(version: int) -> bytes:
    from services.policies.length_stats import Lengths
    from trainer.metrics.files import make_report

    report = make_report(
        [],
        run_id="r",
        formula="f",
        final_version=version,
        digest_match=True,
        root_digest=None,
        commits=0,
        generated=Lengths.of({}),
        dropped={},
    )
    return msgspec.json.encode(report)
