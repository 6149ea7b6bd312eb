"""The summary of a run: what it promises, what it tells people, and what it is made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.runner.evaluation import EvaluationRecord
from clients.runner.measured import Measured
from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.run_store.ledger import Accounts
from services.supervisor.summary import (
    closing_lines,
    components_of,
    read_report,
    success_before,
    summarise,
    write_summary,
)
from services.wire.errors import WireError
from services.wire.rollout_api import EngineReport
from services.wire.run_metrics import EvaluationReport, LengthReport, TaskReport, TrainerReport
from tests.support.step_lines import step_line


def report(server: int, stalls: list[float]) -> EngineReport:
    return EngineReport(
        server_id=f"s{server}",
        name="torch",
        policy_version=60,
        running=0,
        waiting=0,
        paused=False,
        tokens_generated=1000,
        prefill_tokens=500,
        commits=60,
        stalls_ms=stalls,
        open_groups=0,
        admission_waiting=0,
        http_cpu_s=1.5,
    )


def test_the_summary_has_the_promised_keys_and_sums_over_engines(tmp_path: Path) -> None:
    lengths = LengthReport(7680, 9.5, {"8": 7680})
    trainer = TrainerReport(
        run_id="run-1",
        formula="",
        first_group_opened_at=110.0,
        last_step_at=140.0,
        trajectories_trained=7680,
        logprob_gap_max=1e-6,
        root_digest=None,
        commits=60,
        reward_first=0.2,
        reward_last=0.9,
        success_first=0.2,
        success_last=0.9,
        length_first=3.0,
        length_last=12.0,
        lengths_generated=lengths,
        lengths_trained=lengths,
        length_distance=0.0,
        lost_siblings=0,
        dropped={},
        final_version=60,
        steps=60,
        tokens_trained=900,
        max_staleness=2,
        mean_staleness=1.1,
        masked_fraction=0.0,
        mixed_segments=31,
        logprob_gap_mean=1e-7,
        weights_digest_match=True,
        first_step_at=112.5,
    )
    summary = summarise(
        RunSettings(engine="torch").with_threads(2, tiny=True),
        "run-1",
        trainer=trainer,
        evaluation=EvaluationReport(
            *(0.2, 0.98, 3.1, 11.9, 50, [1] * 10 + [0] * 40, [1] * 49 + [0]),
            tasks={
                "easy": TaskReport(2.0, 9.0, [1] * 10, [1] * 10),
                "hard": TaskReport(3.4, 12.6, [0] * 40, [1] * 39 + [0]),
            },
        ),
        accounts=Accounts(published=7800, trained=7680, dropped={"run_concluded": 100, "expired": 20}),
        engines=[report(0, [1.0, 3.0]), report(1, [2.0])],
        began_at=100.0,
        ended_at=150.0,
        restarts=0,
        flips_ms=[0.8, 1.4, 1.0],
        components={"tool_calls": (0.25, 1.0)},
    )
    promised = (
        "seed engine steps k success_before success_after wall_s first_step_s tokens_generated tokens_trained "
        "max_staleness mean_staleness masked_fraction commits stall_ms_p50 stall_ms_max weights_digest_match "
        "trajectories_published trajectories_trained trajectories_dropped logprob_gap_mean"
    )
    assert set(promised.split()) <= set(summary.__struct_fields__)
    assert (summary.first_step_s, summary.wall_s, summary.tokens_generated, summary.commits) == (12.5, 50.0, 2000, 120)
    assert (summary.stall_ms_p50, summary.stall_ms_max) == (2.0, 3.0)
    assert summary.trajectories_published == summary.trajectories_trained + summary.trajectories_dropped
    folder = RunFolder(tmp_path)
    write_summary(folder, summary)
    assert '"success_after": 0.98' in folder.summary.read_text()
    lines = closing_lines(folder, summary)
    told = {line.partition("  ")[0]: line for line in lines}
    assert "each held up generation for 1.0 ms p50, 1.4 max" in told["weight commits"]
    assert told["mean tool_calls"].endswith("0.25 → 1, in training")
    assert "2.0 ms p50, 3.0 max above a usual one" in told["gap at a commit"]
    assert lines[0].endswith("20% (11% to 33%) → 98% (90% to 100%)")
    assert lines[1:3] == [
        "  easy              100% (72% to 100%) → 100% (72% to 100%)",
        "  hard              0% (0% to 9%) → 98% (87% to 100%)",
    ]
    assert any(line.endswith(str(folder.curves)) for line in lines)
    assert "groups-lost" not in told
    folder.logs.mkdir()
    lost = "2026 [warning ] group lost   again=True cause=environment task=t why='KeyError: 7 (a.py:3)'"
    (folder.logs / "environment.log").write_text(f"{lost}\n" * 3)
    told = {line.partition("  ")[0]: line for line in closing_lines(folder, summary)}
    assert told["groups-lost"].endswith(f"nothing is learned from those: rollmesh doctor {folder.root}")


def test_figures_beside_the_reward_are_told_of_the_first_and_the_last_ten_steps(tmp_path: Path) -> None:
    lines = [step_line(step, components={"words": float(step), "success": 1.0}) for step in range(1, 31)]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([*lines, step_line(31, components={"seldom": 2.0})]) + b"\n")
    assert components_of(path) == {"words": (5.5, 25.5), "seldom": (2.0, 2.0)}


def test_a_report_that_is_missing_or_lacks_a_figure_is_named(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    with pytest.raises(WireError, match=r"evaluation\.json cannot be read \(No such file"):
        read_report(path, EvaluationReport)
    for content in ("", "[]", '{"success_before": 0.2}'):
        path.write_text(content)
        with pytest.raises(WireError, match=r"evaluation\.json is not what a summary needs"):
            read_report(path, EvaluationReport)


def test_success_before_training_is_told_with_its_interval_once_it_is_known(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert success_before(folder) is None
    EvaluationRecord(tmp_path).write_before(
        Measured(success=0.25, mean_length=3.0, solved=[1] * 10 + [0] * 10, samples=2)
    )
    assert success_before(folder) == "25% (14% to 40%)"
    EvaluationRecord(tmp_path).write_before(
        Measured(success=0.0, mean_length=0.0, solved=[0] * 4, samples=2, lost=8, lost_why="task: it raised (a.py:5)")
    )
    assert success_before(folder) == "0% (0% to 32%); 8 of 8 episodes lost: task: it raised (a.py:5)"
