"""`./dev bench staleness`: its tokens are exactly K steps old, bars are judged right, and a small table comes out."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from benchmarks.staleness.cli import GREEDY, SAMPLED, app, as_table, bars, finals, plot_finals
from benchmarks.staleness.results import ARMS, Outcome, ResultsFile, StaleRun, named_arms
from benchmarks.staleness.training import LaggedPolicy, Rollouts, StaleTraining
from services.config.settings import TrainerSettings
from services.config.training.algorithm import LossSettings
from services.wire.errors import UsageError
from services.wire.tasks.demonstrations import Question
from services.wire.trajectory import check_trajectory
from trainer.model.logprobs import token_logprobs
from trainer.sft.tiny_model import build_model, build_tokenizer

QUESTIONS = [Question(f"{number}=", "3", "[0-9]3") for number in range(10)] * 40
VERSIONS = {"torch": "1"}


def outcome(correction: str, k: int, seed: int, greedy: float, *, updates: int = 60) -> Outcome:
    return Outcome(
        run=StaleRun(correction=correction, k=k, seed=seed, updates=updates),
        greedy=greedy,
        sampled=greedy / 2,
        behaviour_success=0.5,
        mean_staleness=float(k),
        largest_staleness=k,
        effective_samples=1.0,
        seconds=1.0,
        formula=ARMS[correction].formula(k),
        versions=VERSIONS,
    )


def test_every_arm_is_a_loss_that_the_trainer_takes() -> None:
    formulas = {arm.formula(16) for arm in ARMS.values()}
    assert len(formulas) == len(ARMS) == 9
    assert ARMS["PPO"].loss == LossSettings() == TrainerSettings().loss
    assert math.isinf(ARMS["IcePop"].loss.correction.cap)
    assert named_arms(["gspo", "PPO", "None"]) == ["none", "PPO", "GSPO"]
    with pytest.raises(UsageError, match="no correction 'ppo2'"):
        named_arms(["ppo2"])


def test_the_lagged_policy_is_the_one_of_k_steps_before() -> None:
    model = build_model(seed=1, hidden_size=32, layers=1)
    weight = model.model.embed_tokens.weight
    lagged = LaggedPolicy(build_model(seed=1, hidden_size=32, layers=1), 2)
    seen = []
    for version in range(6):
        with torch.no_grad():
            weight.fill_(float(version))
        lagged.keep(version, model)
        sampled_by, policy = lagged.before(version)
        seen.append(sampled_by)
        assert torch.equal(policy.model.embed_tokens.weight, torch.full_like(weight, float(sampled_by)))
    assert seen == [0, 0, 0, 1, 2, 3]


def test_rollouts_are_trajectories_with_the_logprobs_of_who_drew_them() -> None:
    model, tokenizer = build_model(seed=3, hidden_size=32, layers=1).eval(), build_tokenizer()
    rollouts = Rollouts(tokenizer, 4, 6, torch.Generator().manual_seed(1))
    groups = rollouts.play(model, 7, QUESTIONS[:3], 5)
    assert [group.ordinal for group in groups] == [5, 6, 7]
    for group in groups:
        for member in group.members:
            check_trajectory(member.payload)
            [segment] = member.payload.segments
            [span] = segment.version_spans
            assert (span.start, span.version) == (2, 7) and 1 <= span.length <= 6
            ids = torch.frombuffer(bytearray(segment.token_ids), dtype=torch.int32).long()[None]
            sampled = torch.frombuffer(bytearray(segment.logprobs), dtype=torch.float32)[2:]
            with torch.no_grad():
                assert torch.allclose(token_logprobs(model, ids, 2)[0], sampled, atol=1e-5)
            text = tokenizer.decode(ids[0, 2:])
            assert member.payload.reward == float(text[1:] == "3$" and text[0].isdigit())


@pytest.mark.parametrize(("correction", "k"), [("none", 0), ("none", 3), ("decoupled", 1), ("decoupled", 4)])
def test_tokens_are_exactly_k_steps_old(correction: str, k: int) -> None:
    run = StaleRun(correction=correction, k=k, seed=1, updates=6)
    training = StaleTraining(run, lambda: build_model(seed=2, hidden_size=32, layers=1), build_tokenizer(), QUESTIONS)
    while training.version < run.updates:
        training.batch()
    assert training.staleness == [float(min(k, step)) for step in range(6)]
    assert training.largest_staleness == k


def test_bars_hold_only_where_the_means_do() -> None:
    table: dict[str, dict[int, list[float]]] = {
        "none": {4: [0.4, 0.6], 16: [0.2, 0.3]},
        "PPO": {4: [0.9, 0.92], 16: [0.7, 0.9]},
        "TIS": {4: [0.96, 0.85], 16: [0.9, 0.87]},
    }
    assert all(bars(table).values()) and len(bars(table)) == 4
    worse = table | {"TIS": {4: [0.95, 0.84], 16: [0.9, 0.85]}, "none": {4: [0.4, 0.62], 16: [0.2, 0.3]}}
    assert bars(worse) == {
        "none ≤ 0.5 at K=4": False,
        "none ≤ 0.5 at K=16": True,
        "2 corrected ≥ 0.9 at K=4": False,
        "1 corrected ≥ 0.88 at K=16": False,
    }
    assert bars({"PPO": {8: [1.0]}}) == {}


def test_outcomes_become_the_table_by_correction_and_k(tmp_path: Path) -> None:
    outcomes = [outcome(name, k, seed, 0.1 * seed) for name in ("none", "PPO") for k in (0, 4) for seed in (1, 2)]
    assert finals(outcomes, GREEDY) == {"none": {0: [0.1, 0.2], 4: [0.1, 0.2]}, "PPO": {0: [0.1, 0.2], 4: [0.1, 0.2]}}
    assert finals(outcomes, SAMPLED)["PPO"][4] == [0.05, 0.1]
    assert as_table(outcomes, GREEDY).row_count == 2
    plot_finals(finals(outcomes, GREEDY), tmp_path / "plot.svg")
    sampled = (tmp_path / "plot.svg").read_text()
    assert sampled.startswith("<?xml") and ">PPO<" in sampled


def test_an_interrupted_table_goes_on_and_other_runs_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ResultsFile(path, VERSIONS)
    runs = [StaleRun(correction="PPO", k=4, seed=seed, updates=60) for seed in (1, 2)]
    assert file.known(runs) == []
    first = outcome("PPO", 4, 1, 0.9)
    for line in (first, outcome("PPO", 4, 2, 0.9, updates=30), outcome("TIS", 4, 2, 0.9)):
        file.append(line)
    assert file.known(runs) == [first]
    assert ResultsFile(path, {"torch": "2"}).known(runs) == []
    path.write_text('{"run": 3}\n')
    with pytest.raises(UsageError, match="holds no results"):
        file.known(runs)


def test_the_docs_have_its_arms_and_flags_that_it_takes() -> None:
    text = (Path(__file__).parents[3] / "docs" / "staleness.md").read_text()
    for name in ARMS:
        assert len(re.findall(rf"^\| `?{name}`? ", text, flags=re.MULTILINE)) == 3
    lines = re.findall(r"^\$ ./dev bench staleness(.*)$", text, flags=re.MULTILINE)
    for line in lines:
        typer.main.get_command(app).make_context("staleness", shlex.split(line, comments=True))
    assert len(lines) == 3


def test_misuse_is_one_line(tmp_path: Path) -> None:
    for flags in (("--ks", "1,x"), ("--seeds", "-1"), ("--corrections", "nothing")):
        command = [sys.executable, "-P", "-m", "benchmarks", "staleness", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        assert ended.returncode == 2
        assert ended.stderr.startswith("rollmesh: ") and ended.stderr.count("\n") == 1


@pytest.mark.slow
def test_uncorrected_training_collapses_at_k_8_and_ppo_does_not(tmp_path: Path) -> None:
    out, environment = tmp_path / "out.jsonl", {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-P", "-m", "benchmarks", "staleness", "--json"]
    small = ["--ks", "8", "--corrections", "none,PPO", "--seeds", "1", "--out", str(out)]
    ended = subprocess.run(
        [*command, *small], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    table = json.loads(ended.stdout)
    assert table.keys() == {"none", "PPO"}
    [none], [ppo] = table["none"]["8"], table["PPO"]["8"]
    assert none < 0.5, table
    assert ppo > 0.8, table
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["largest_staleness"] for line in lines} == {8}
