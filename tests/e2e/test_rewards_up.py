"""A task of nothing but prompts and a reward function, trained on through the whole mesh as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kept_rollouts import read_samples
from tests.support.mesh_command import processes_of_runs_in, run_command, summary_of

pytestmark = pytest.mark.e2e

RUN = """
[rewards]
enabled = true

[[rewards.components]]
name = "digits"
function = "up_judges:digits"
workers = 2

[[rewards.components]]
name = "gone"
function = "up_judges:gone"
substitute = 0.5
"""
FUNCTIONS = """
def digits(answer, most): return sum(letter.isdigit() for letter in answer) / most
def gone(answer): raise ValueError("never there")
"""


@pytest.mark.slow
def test_prompts_and_a_function_are_all_that_a_run_needs(tmp_path: Path, tiny_policy: Path) -> None:
    (tmp_path / "up_judges.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{number:03d}=", "most": 6} for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(RUN)
    run_dir = tmp_path / "run"
    small = [
        "rollout.groups_per_step=2",
        "rollout.group_size=4",
        "rollout.max_tokens=6",
        "evaluation.problems=4",
        "k=0",
    ]
    arguments = ["up", "--config", "run.toml", "--task", "prompts:rows.jsonl?success=10", "--steps", "2"]
    done = run_command(
        [*arguments, "--engine", "torch", "--run-dir", str(run_dir), f"model.path={tiny_policy}", *small],
        cwd=tmp_path,
        deadline_s=120.0,
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert summary_of(run_dir)["steps"] == 2
    samples = read_samples(run_dir)
    assert samples
    for sample in samples:
        assert sample.reward >= 0.5
        assert (sample.reward - 0.5) * 6 == pytest.approx(round((sample.reward - 0.5) * 6))
    assert "1·digits + 1·gone" in (run_dir / "logs" / "rewards.log").read_text(encoding="utf-8")
    assert processes_of_runs_in(run_dir) == []


TASKS = """
k = 0
steps = 3
seed = 4

[[tasks]]
task = "prompts:rows.jsonl?success=10"
name = "digits"
weight = 2

[[tasks]]
task = "running-sums"
max_tokens = 3

[curriculum]
enabled = true

[rewards]
enabled = true

[[rewards.components]]
name = "digits"
function = "up_judges:digits"
tasks = ["digits"]

[rollout]
groups_per_step = 6
group_size = 4
max_tokens = 6

[evaluation]
problems = 4
"""


@pytest.mark.slow
def test_several_tasks_and_a_curriculum_are_a_configuration(tmp_path: Path, tiny_policy: Path) -> None:
    (tmp_path / "up_judges.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{number:03d}=", "most": 6} for number in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.toml").write_text(TASKS)
    run_dir = tmp_path / "run"
    arguments = ["up", "--config", "run.toml", "--engine", "torch", "--run-dir", str(run_dir)]
    done = run_command([*arguments, f"model.path={tiny_policy}"], cwd=tmp_path, deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    summary = summary_of(run_dir)
    assert summary["task"] == "digits (67%), running-sums (33%)"
    assert {name: of["problems"] for name, of in summary["tasks"].items()} == {"digits": 1, "running-sums": 4}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        assert {name: of["groups"] for name, of in line["tasks"].items()} == {"digits": 4, "running-sums": 2}
        assert line["tasks"]["running-sums"]["response_length"] <= 3
        assert line["tasks"]["running-sums"]["skipped"] is None
    # 7 rows are trained on, all of them never solved by 10: from the second pass on, most of them rest.
    assert [line["tasks"]["digits"]["skipped"] for line in lines][-1] > 0.0
    kept = json.loads((run_dir / "curriculum-environment.json").read_text(encoding="utf-8"))
    assert kept["digits"]["state"]["passed"] >= 1
    samples = read_samples(run_dir)
    assert {sample.task for sample in samples} <= {"digits", "running-sums"}
    assert "by task" in done.out and processes_of_runs_in(run_dir) == []


def test_prompts_that_nobody_would_judge_are_refused_before_anything_is_started(
    tmp_path: Path, tiny_policy: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1="}')
    task = ["--task", "prompts:rows.jsonl", "--engine", "torch", f"model.path={tiny_policy}"]
    done = run_command(["up", *task, "--run-dir", str(tmp_path / "run")], cwd=tmp_path)
    assert (done.code, "nobody to judge" in done.err) == (2, True), done.err
    assert not (tmp_path / "run").exists()
