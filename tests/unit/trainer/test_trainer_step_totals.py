"""What is told of the trainer, from the lines that it writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from services.host.files import LineTail
from services.observability.catalog import (
    TRAINER_DROPPED,
    TRAINER_SECONDS,
    TRAINER_STEPS,
    TRAINER_TASK_SUCCESS,
    TRAINER_TOKENS,
)
from services.observability.run_view.observer import MetricsTail
from services.policies.length_stats import Lengths
from services.wire.run_metrics import StepMetrics, TaskOutcome, TrainerReport
from tests.support.step_lines import step_line, step_metrics
from trainer.metrics.exporter import RECENT_STEPS, StepTotals
from trainer.metrics.files import RunRecords, make_report, plot_curves, read_metrics


def report_of(lines: list[StepMetrics]) -> TrainerReport:
    return make_report(
        lines,
        run_id="r",
        formula="",
        final_version=3,
        digest_match=True,
        root_digest=None,
        commits=1,
        generated=Lengths.of(Counter()),
        dropped={},
    )


def test_counters_add_up_over_all_steps_and_the_busy_share_is_of_the_last() -> None:
    totals = StepTotals(steps=100, k=2)
    assert totals.status() is None
    assert list(totals.readings()) == []
    totals.add([step_line(step, wait_ms=1000.0) for step in range(1, 6)])
    totals.add([step_line(step) for step in range(6, 6 + RECENT_STEPS)])
    report = totals.status()
    assert report is not None
    assert (report.step, report.steps, report.k, report.over_steps) == (25, 100, 2, RECENT_STEPS)
    assert report.busy_share == pytest.approx(0.75)
    assert report.dropped == {"late": 25}
    figures = {(each.metric, *each.labels): each.value for each in totals.readings()}
    assert figures[TRAINER_STEPS,] == 25
    assert figures[TRAINER_TOKENS, "1"] == 125
    assert figures[TRAINER_DROPPED, "late"] == 25
    assert figures[TRAINER_SECONDS, "wait"] == pytest.approx(5.0 + 0.25 * RECENT_STEPS)


def test_tasks_are_told_over_the_last_steps_each_weighed_by_its_trajectories() -> None:
    totals = StepTotals(steps=100, k=2)
    of = {"groups": 1, "trajectories": 4, "reward": 1.0, "success": 1.0, "response_length": 8.0}
    none = {"groups": 3, "trajectories": 12, "reward": 0.0, "success": 0.0, "response_length": 4.0}
    totals.add([step_line(1, tasks={"a": of, "b": of}), step_line(2, tasks={"a": none})])
    report = totals.status()
    assert report is not None
    assert report.tasks == {
        "a": TaskOutcome(groups=4, trajectories=16, reward=0.25, success=0.25, response_length=5.0),
        "b": TaskOutcome(groups=1, trajectories=4, reward=1.0, success=1.0, response_length=8.0),
    }
    figures = {(each.metric, *each.labels): each.value for each in totals.readings()}
    assert (TRAINER_TASK_SUCCESS, "a") in figures and (TRAINER_TASK_SUCCESS, "b") not in figures


def test_a_torn_line_is_read_once_it_is_whole_or_never_where_it_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = LineTail(file)
    assert tail.new_lines() == []
    file.write_bytes(b"one\ntw")
    assert tail.new_lines() == [b"one"]
    assert tail.new_lines() == []
    with file.open("r+b") as torn:  # As a trainer that comes back cuts it off.
        torn.truncate(4)
        torn.seek(4)
        torn.write(b"2\nthree\n")
    assert tail.new_lines() == [b"2", b"three"]


def test_no_reader_ends_at_a_line_that_lacks_a_figure(tmp_path: Path) -> None:
    """As runs of before wrote where a loss or weights were not finite: what is no number is null."""
    path = tmp_path / "metrics.jsonl"
    null = msgspec.json.decode(step_line(2)) | dict.fromkeys(("loss", "grad_norm", "reward", "learning_rate"))
    path.write_bytes(b"\n".join([step_line(1), msgspec.json.encode(null), b"\xff", step_line(3), b""]))
    lines = read_metrics(path)
    assert [line.step for line in lines] == [1, 3]
    totals = StepTotals(steps=9, k=2)
    totals.add(LineTail(path).new_lines())
    status = totals.status()
    assert status is not None and status.step == 3
    assert MetricsTail(path).read() == lines[-1]
    path.write_bytes(step_line(1) + b"\n" + msgspec.json.encode(null) + b"\n")
    tail = MetricsTail(path)
    assert tail.read() == lines[0], "the newest that can be read"
    records = RunRecords(path)
    assert records.steps == {1, 2}, "the step is not written once more"
    records.close()
    assert report_of(lines).steps == 2
    plot_curves(lines, Lengths.of(Counter()), tmp_path / "curves.png")


def test_the_divergence_from_a_teacher_is_plotted_where_there_is_one(tmp_path: Path) -> None:
    plain = [step_metrics(step) for step in (1, 2)]
    for name, lines in (("plain", plain), ("taught", [step_metrics(step, teacher_kl=0.5) for step in (1, 2)])):
        plot_curves(lines, Lengths.of(Counter()), tmp_path / f"{name}.svg")
        # Above the outlines of its letters each text stands as a comment.
        shown = "reverse KL to the teacher" in (tmp_path / f"{name}.svg").read_text()
        assert shown == (name == "taught")


def test_a_report_counts_a_trajectory_once_and_a_token_in_each_epoch() -> None:
    batch = {"trajectories": 4, "response_length": 8.0, "response_lengths": {"8": 4}, "lost_siblings": 1, "tokens": 30}
    report = report_of([step_metrics(step, epoch=epoch, **batch) for step, epoch in ((1, 1), (2, 2), (3, 1), (4, 2))])
    assert (report.steps, report.trajectories_trained, report.lost_siblings) == (4, 8, 2)
    assert (report.lengths_trained.episodes, report.lengths_trained.mean, report.tokens_trained) == (8, 8.0, 120)
