"""Foreign environments trained on for a few steps through the whole mesh, as a user starts it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clients.environments.registry import make_task
from services.wire.run_metrics import Sample
from tests.support.chat_lessons import Lesson, teach
from tests.support.kept_rollouts import read_samples
from tests.support.mesh_command import processes_of_runs_in, run_command, summary_of

pytestmark = pytest.mark.e2e

SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&allow_negation=false"
GUESSING = "textarena:GuessTheNumber-v0?max_turns=3"
TASKS = {"sums": SUMS, "game": GUESSING}
GROUPS, SIBLINGS = 2, 6


@pytest.fixture(scope="module")
def pupil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that answers both tasks in their form: sums with some small number, guesses with any."""
    sums, game = make_task(SUMS).environment, make_task(GUESSING).environment

    def lesson(numbers: random.Random) -> Lesson:
        if numbers.random() < 0.5:
            problem = sums.problem("train", numbers.randrange(1000), 1)
            return [f"{problem.prompt}\n", problem.solution]
        opening = game.start(game.problem("train", 0, 1)).first_turn  # type: ignore[union-attr]
        said: list[str] = [opening]
        for turn in range(3):
            said.append(str(numbers.randint(1, 20)))
            if turn < 2:
                said.append(f"The target number is {numbers.choice(['lower', 'higher'])}.\n")
        return said

    folder = tmp_path_factory.mktemp("pupil") / "model"
    teach(folder, lesson, steps=40, batch=8)
    return folder


def train(
    task: Sequence[str], pupil: Path, run_dir: Path, *settings: str
) -> tuple[dict[str, Any], list[dict[str, Any]], list[Sample]]:
    """Three steps; returns the summary, the lines of metrics.jsonl and the rollouts that are kept."""
    arguments = ["up", *task, "--steps", "3", "--engine", "torch", "--run-dir", str(run_dir)]
    # K = 0: every token is of the version that trains it, so that each step can compare its logprobs with the engine's.
    size = [f"rollout.groups_per_step={GROUPS}", f"rollout.group_size={SIBLINGS}", "k=0", "samples.cpu_share=1"]
    small = [*size, "rollout.max_tokens=6", "evaluation.problems=8"]
    done = run_command([*arguments, f"model.path={pupil}", *small, *settings], deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert processes_of_runs_in(run_dir) == []
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return summary_of(run_dir), metrics, read_samples(run_dir)


def assert_trained(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    assert summary["steps"] == summary["final_version"] == 3
    assert summary["trajectories_trained"] == 3 * GROUPS * SIBLINGS
    assert summary["weights_digest_match"] is True
    assert summary["logprob_gap_mean"] <= 1e-4
    # A group whose rewards are all equal gives no gradient: some rewards differed.
    assert sum(line["rows_trained"] for line in metrics) > 0
    assert any(line["grad_norm"] > 0 for line in metrics)


@pytest.mark.slow
def test_a_reasoning_gym_task_and_a_textarena_game_of_several_turns_are_trained_on(pupil: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("".join(f'[[tasks]]\ntask = "{task}"\nname = "{name}"\n' for name, task in TASKS.items()))
    summary, metrics, samples = train(["--config", str(config)], pupil, tmp_path / "run")
    assert_trained(summary, metrics)
    assert summary["task"] == "sums (50%), game (50%)"
    # A group of each in every step.
    told = {name: [sample.segments for sample in samples if sample.task == name] for name in TASKS}
    assert {name: len(found) for name, found in told.items()} == dict.fromkeys(TASKS, 3 * SIBLINGS)
    for (segment,) in told["sums"]:
        assert segment.text.startswith("<|im_start|>user\nState the final answer")
        assert len(segment.spans) == 1
    turns = []
    for (segment,) in told["game"]:
        assert "You are playing Guess The Number" in segment.text
        spans = [span.text for span in segment.spans]
        turns.append(sum(text.count("<|im_end|>") for text in spans))
        assert not any("target number" in text for text in spans), "what the game says is not trained on"
    assert max(turns) > 1


@pytest.mark.slow
def test_an_agent_with_a_tool_runs_as_it_is(pupil: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    agent = Path(__file__).parents[2] / "docs" / "examples" / "calculator_agent.py"
    summary, metrics, samples = train(["--task", f"python:{agent}:calculator"], pupil, tmp_path / "agent", "steps=1")
    assert summary["trajectories_trained"] == GROUPS * SIBLINGS
    assert summary["run_id"].startswith("calculator-agent-calculator-")
    assert metrics[0]["tokens"] > 0
    assert "multiply" in samples[0].segments[0].text
    assert "lost" not in (tmp_path / "agent" / "logs" / "environment.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_model_without_a_chat_template_plays_in_plain_text(tiny_policy: Path, tmp_path: Path) -> None:
    summary, _, samples = train(["--task", SUMS], tiny_policy, tmp_path / "text", "steps=1")
    assert summary["final_version"] == 1
    assert "dialect=text" in (tmp_path / "text" / "logs" / "environment.log").read_text(encoding="utf-8")
    assert "the final answer" in samples[0].segments[0].text
    assert "im_start" not in samples[0].segments[0].text


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ("reasoning-gym:chain_sun", "did you mean 'chain_sum'"),
        ("reasoning-gym:chain_sum?max_term=3", "did you mean 'max_terms'?"),
        ("textarena:GuessTheNumber", "did you mean 'GuessTheNumber-v0'"),
        ("textarena:TicTacToe-v0", "no game for one player"),
        ("textarena:Wordle-v0", "?downloads=true"),
        ("python:./missing.py:make", "missing.py, which the task is in"),
        ("reasoning-gim:chain_sum", "did you mean 'reasoning-gym:…'"),
    ],
)
def test_a_task_that_cannot_be_made_is_one_line_before_anything_starts(
    tiny_policy: Path, tmp_path: Path, task: str, complaint: str
) -> None:
    run_dir = tmp_path / "run"
    done = run_command(["up", "--task", task, "--run-dir", str(run_dir), f"model.path={tiny_policy}"], cwd=tmp_path)
    assert done.code == 2
    assert complaint in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not run_dir.exists()


def test_a_task_without_demonstrations_needs_a_model(tmp_path: Path) -> None:
    done = run_command(["up", "--task", "reasoning-gym:chain_sum", "--run-dir", str(tmp_path / "run")])
    assert done.code == 2
    assert "no demonstrations" in done.err
    assert "model.path=" in done.err
