"""What is told of the trainer, from the lines that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from services.host.files import LineTail
from services.observability.catalog import TRAINER_DROPPED, TRAINER_SECONDS, TRAINER_STEPS, TRAINER_TOKENS
from tests.support.step_lines import step_line
from trainer.metrics.exporter import RECENT_STEPS, StepTotals


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
