"""`rollmesh runs`, `compare` and `samples` on folders as a run leaves them, and how curves become bands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.host.run_folder import RunFolder, held
from services.observability.terminal import sparkline
from services.policies.progress.confidence import mean_interval, t_quantile
from services.policies.progress.curves import Curve, arms, banded, curve_of, differences
from services.status.cli import status
from services.status.dead_letters_cli import dead_letters
from services.wire.errors import UsageError
from services.wire.run_metrics import EvaluationReport, Sample, SampledSegment, SampledSpan
from tests.support.kept_rollouts import keep_text
from tests.support.step_lines import step_metrics


def make_run(
    root: Path, name: str, settings: str, success: Sequence[float], *, done: bool = True, old: bool = False
) -> RunFolder:
    """`old`: as rollmesh made it that kept two rollouts a step."""
    folder = RunFolder(root / name)
    folder.root.mkdir(parents=True)
    folder.config.write_text(f'task = "running-sums"\nengine = "torch"\nsteps = {len(success)}\n{settings}')
    folder.run_id.write_text(f"{name}\n")
    folder.lock.touch()
    lines = [step_metrics(step, success=each, tokens=100, time=1000.0 + step) for step, each in enumerate(success, 1)]
    folder.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    samples = [
        _sample(step, reward=float(step % 2), tokens=step, text=f"{step}+1=" + "\x1b[2J" * (step == 8))
        for step in range(1, 9)
    ]
    if old:
        folder.samples.write_bytes(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples) + b'{"torn')
    else:
        for each in samples:
            (segment,) = each.segments
            keep_text(
                folder.rollouts, each.step, segment.text, sampled=each.tokens or 0, reward=each.reward, task=each.task
            )
    if done:
        right = round(32 * success[-1])
        solved = ([1] * 8 + [0] * 24, [1] * right + [0] * (32 - right))
        folder.evaluation.write_bytes(msgspec.json.encode(EvaluationReport(0.25, success[-1], 3.0, 9.0, 32, *solved)))
        folder.summary.write_text("{}")
    return folder


def _sample(step: int, *, reward: float, tokens: int, text: str) -> Sample:
    said = "y" * tokens
    segment = SampledSegment(f"{text}{said}", [SampledSpan(step - 1, said)], None)
    return Sample(
        step=step, group="g", ordinal=step, member=0, task="running-sums", server="s0", reward=reward,
        versions=[step - 1], segments=[segment], tokens=tokens,
    )  # fmt: skip


def rollmesh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: `a` and `b` differ in the seed, `c` in K, too, and was interrupted."""
    place = tmp_path_factory.mktemp("place")
    make_run(place / "runs", "a", "seed = 1\nk = 2\n", [0.2, 0.4, 0.6])
    make_run(place / "runs", "b", "seed = 2\nk = 2\n", [0.4, 0.6, 0.8])
    make_run(place / "runs", "c", "seed = 1\nk = 0\n", [0.1, 0.1], done=False)
    make_run(place / "older", "old", "seed = 1\n", [0.2], old=True)
    return place


def test_runs_are_listed_with_their_state_and_success(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    told = rollmesh("runs", "--json", cwd=place)
    assert told.returncode == 0, told.stderr
    lines = {each["run_id"]: each for each in map(json.loads, told.stdout.splitlines())}
    assert {name: line["state"] for name, line in lines.items()} == {"a": "done", "b": "done", "c": "interrupted"}
    assert (lines["b"]["success_before"], lines["b"]["success_after"]) == (0.25, 0.8)
    assert (lines["c"]["success"], lines["c"]["success_after"], lines["c"]["step"]) == (0.1, None, 2)
    assert lines["a"]["size_bytes"] == sum(path.stat().st_size for path in (place / "runs" / "a").rglob("*"))
    ignored = rollmesh("runs", "--root", "elsewhere", "prune", "--keep", "0", "--yes", cwd=place)
    assert ignored.returncode == 2 and "behind prune" in ignored.stderr, "not what lies in ./runs"
    shown = rollmesh("runs", cwd=place).stdout
    assert re.search(r"25% → 80% \(6\d to 9\d%\)", shown), "with its interval"
    assert "10% of a batch" in shown


def test_a_folder_that_cannot_be_read_is_named_and_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "good", "seed = 1\n", [0.5])
    make_run(tmp_path / "runs", "torn", "seed = = 1\n", [0.5])
    told = rollmesh("runs", "--json", cwd=tmp_path)
    assert [json.loads(line)["run_id"] for line in told.stdout.splitlines()] == ["good"]
    assert "torn is left out" in told.stderr and told.returncode == 0


def test_compare_names_what_differs_and_draws(place: Path) -> None:
    told = rollmesh("compare", "a", "b", "runs/c", "--by", "tokens", "--plot", "c.png", cwd=place)
    assert told.returncode == 0, told.stderr
    rows = [line.split() for line in told.stdout.splitlines()]
    assert ["k", "2", "2", "0"] in rows and ["seed", "1", "2", "1"] in rows
    assert not any(row[:1] in (["engine"], ["task"]) for row in rows), "they are equal"
    assert "a and 1 of other seeds" in told.stdout
    assert re.search(r"held out, before +25\.0% \(1\d\.\d% to 4\d\.\d%\)", told.stdout), "with its interval"
    assert (place / "c.png").read_bytes().startswith(b"\x89PNG")
    assert rollmesh("compare", "a", cwd=place).returncode == 2


def test_of_many_runs_each_is_a_row(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(5)]
    for number, name in enumerate(names):
        make_run(tmp_path, name, f"seed = {number}\n", [0.5])
    told = rollmesh("compare", *names, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    rows = [line.split() for line in told.stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["run"]) == ["run", "seed"]
    assert all([name, str(number)] in rows for number, name in enumerate(names))
    assert "…" not in told.stdout.partition("success of the batch")[0], "nothing is cut"


@pytest.mark.parametrize("run", ["a", "older/old"])
def test_samples_are_chosen_by_step_reward_length_and_text(place: Path, run: str) -> None:
    def steps(*arguments: str) -> list[int]:
        told = rollmesh("samples", run, "--json", *arguments, cwd=place)
        assert told.returncode == 0, told.stderr
        return [json.loads(line)["step"] for line in told.stdout.splitlines()]

    assert steps() == [1, 2, 3, 4, 5, 6, 7, 8], "a torn line is left out"
    assert steps("--step", "3..5", "--reward", "1") == [3, 5]
    assert steps("--length", "..2") == [1, 2]
    assert steps("--text", "7+1") == [7]
    assert steps("--sort", "reward", "--last", "2") == [5, 7]
    assert steps("--task", "another") == []
    read = rollmesh("samples", run, "--step", "4", cwd=place)
    assert "4+1=»yyyy«\n" in read.stdout and read.stdout.endswith("; »sampled«\n")
    assert "reward 0 · 4 tokens · version 3" in read.stdout
    steered = rollmesh("samples", run, "--step", "8", cwd=place).stdout
    assert "8+1=\\x1b[2J»yyyyyyyy«" in steered and "\x1b[2J" not in steered, (
        "what a model writes does not steer the terminal"
    )
    missing = rollmesh("samples", run, "--step", "99", cwd=place).stdout
    assert missing.startswith("0 of 0 samples") and missing.endswith("samples of steps 1 to 8 are kept\n")
    wrong = rollmesh("samples", run, "--step", "x", cwd=place)
    assert wrong.returncode == 2 and "'x' is no number" in wrong.stderr
    assert rollmesh("samples", "nosuch", cwd=place).returncode == 2


def test_a_run_that_an_older_rollmesh_began_has_samples_of_both(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", "a", "seed = 1\n", [0.5], old=True)
    for step in (8, 9):
        keep_text(folder.rollouts, step, f"new {step}")
    told = rollmesh("samples", "--json", cwd=tmp_path)
    read = [json.loads(line) for line in told.stdout.splitlines()]
    assert [each["step"] for each in read] == [*range(1, 10)]
    assert [each["segments"][0]["text"] for each in read[-2:]] == ["new 8", "new 9"]


def test_dead_letters_of_a_run_that_has_ended_are_looked_for_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.host.run_folder.USUAL_REDIS", "redis://127.0.0.1:1/0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no Redis answers"):
        dead_letters()
    make_run(tmp_path / "runs", "a", "seed = 1\n", [0.5])
    with pytest.raises(UsageError, match=r"the run's Redis has ended: .*runs/a/summary\.json has what was dropped"):
        dead_letters()
    with pytest.raises(UsageError, match="no Redis answers"):
        dead_letters(redis_url="redis://127.0.0.1:1/0")


def test_status_says_that_no_run_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.host.run_folder.USUAL_REDIS", "redis://127.0.0.1:1/0")
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "a", "seed = 1\n", [0.5])
    with pytest.raises(UsageError, match=r"no run is running in \./runs.*`rollmesh runs`"):
        status()
    with pytest.raises(UsageError, match=r"^no Redis answers"):
        status(redis_url="redis://127.0.0.1:1/0")


def test_prune_keeps_the_newest_and_whatever_runs_and_asks_first(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "runs", name, "seed = 1\n", [0.5], done=name != "b") for name in "abcd"]
    for age, folder in enumerate(folders):
        _set_age(folder.config, 100 * (len(folders) - age))
    with held(folders[0]):
        asked = rollmesh("runs", "prune", "--keep", "1", cwd=tmp_path)
        assert asked.returncode == 2 and "add --yes" in asked.stderr
        assert all(folder.root.exists() for folder in folders)
        refused = rollmesh("runs", "remove", "c", "a", cwd=tmp_path)
        assert refused.returncode == 2 and "runs" in refused.stderr
        assert folders[2].root.exists(), "none is removed where one is refused"
        assert rollmesh("runs", "prune", "--keep", "1", "--interrupted", "--yes", cwd=tmp_path).returncode == 0
        assert [folder.root.exists() for folder in folders] == [True, False, True, True]
        assert rollmesh("runs", "prune", "--keep", "1", "--yes", cwd=tmp_path).returncode == 0
    assert [folder.root.exists() for folder in folders] == [True, False, False, True]
    (tmp_path / "other").mkdir()
    assert rollmesh("runs", "remove", "../other", cwd=tmp_path).returncode == 2
    assert (tmp_path / "other").exists(), "only a run folder is removed"


def _set_age(path: Path, seconds: float) -> None:
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


def test_what_differs_and_who_belongs_together() -> None:
    settings: list[dict[str, object]] = [
        {"k": 2, "seed": 1, "run_dir": "x"},
        {"k": 2, "seed": 2, "run_dir": "y"},
        {"k": 2, "seed": 3, "l": 1},
    ]
    assert differences(settings) == {"l": [None, None, 1], "seed": [1, 2, 3]}
    assert arms(["a", "b", "c"], settings) == [["a", "b"], ["c"]]


def test_a_figure_over_steps_tokens_and_time_leaves_out_what_a_step_does_not_know() -> None:
    lines = [step_metrics(step, entropy=None if step == 2 else 1.0, tokens=10, time=5.0 + step) for step in (1, 2, 3)]
    assert list(curve_of(lines, "entropy", "step").xs) == [1, 3]
    assert list(curve_of(lines, "entropy", "tokens").xs) == [10, 30]
    assert list(curve_of(lines, "entropy", "time").xs) == [0, 2]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20), min_size=1, max_size=5))
def test_a_band_lies_round_its_mean_and_of_two_within_its_runs(runs: list[list[float]]) -> None:
    band = banded([Curve(list(range(len(ys))), ys) for ys in runs])
    lowest, highest = min(map(min, runs)), max(map(max, runs))
    for low, mean, high in zip(band.low, band.mean, band.high, strict=True):
        assert low <= mean + 1e-6 and mean - 1e-6 <= high and lowest - 1e-6 <= mean <= highest + 1e-6
        assert len(runs) > 2 or (lowest - 1e-6 <= low and high <= highest + 1e-6)
    assert band.kind == {1: "none", 2: "extremes"}.get(len(runs), "mean")
    assert band.xs[-1] == pytest.approx(min(map(len, runs)) - 1), "no further than the shortest run"


def test_an_interval_is_students() -> None:
    # Of any table.
    known = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423, 119: 1.9801}
    assert {freedom: round(t_quantile(freedom), 4) for freedom in known} == known
    band = banded([Curve([0, 1], [0.5 + each, 0.5 + each]) for each in (-0.1, 0.0, 0.1)])
    half = 4.302653 * 0.1 / 3**0.5
    assert (band.low[-1], band.high[-1]) == pytest.approx((0.5 - half, 0.5 + half))
    with pytest.raises(ValueError, match="1 values have no interval"):
        mean_interval([0.5])


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0, 3) == "▁▅█"
    assert sparkline([], 0.0, 1.0, 3) == ""
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0, 30) == "▁▅█", "the last one is there, however much room there is"
    assert sparkline([0.0, 0.2, 0.5, 0.8, 1.0], 0.0, 1.0, 3) == "▁▅█"
    assert sparkline([0.0, float("nan"), float("inf"), 1.0], 0.0, 1.0, 9) == "▁  █"
