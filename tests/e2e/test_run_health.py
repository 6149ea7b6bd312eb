"""A run that cannot learn says why within its first steps: planted causes, through the whole mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mesh_command import run_command, summary_of
from trainer.sft.tiny_model import build_model, save_policy

TASKS = '''
from clients.environments.base import Ended, Problem

class Task:
    """One answer to a number; what it is worth is the cause that is planted."""

    def __init__(self, name="plain"):
        self.name = name

    def problem(self, split, index, seed):
        prompt = "漢字=" if self.name == "foreign" else f"{index % 7}{index % 5}="
        return Problem(split, index, prompt=prompt)

    def start(self, problem):
        return Episode(self.name, problem.prompt)

class Episode:
    def __init__(self, name, prompt):
        self.name, self.first_turn = name, prompt

    def respond(self, answer):
        odd = len(answer.text) % 2 == 1
        rewards = {"hopeless": 0.0, "huge": 1e7 * odd}
        return Ended(rewards.get(self.name, float(odd)), success=False)
'''
PLANTED = [
    ("no_signal", "hopeless", []),
    ("unknown_tokens", "foreign", []),
    ("truncated", "plain", ["rollout.max_tokens=2"]),
    ("entropy", "plain", ["rollout.temperature=0.01"]),
    ("gradient", "huge", ["trainer.advantage.std=false"]),
    ("ratios", "plain", ["trainer.learning_rate=0.3", "trainer.warmup_steps=0", "trainer.clip_grad_norm=1e9"]),
]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "task", "settings"), PLANTED, ids=[kind for kind, *_ in PLANTED])
def test_a_planted_cause_is_named(kind: str, task: str, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    model = build_model(seed=5, hidden_size=32, layers=1)
    if kind == "entropy":
        # A fresh model's logits are so close to each other that even this temperature leaves a choice.
        model.get_output_embeddings().weight.data *= 30
    save_policy(model, tmp_path / "model")
    run_dir = tmp_path / "run"
    small = [f"model.path={tmp_path / 'model'}", "evaluation.problems=4", "rollout.groups_per_step=4"]
    # Off-policy tokens come with the second step; what chance may bring about is named at the second one that shows it.
    steps = 4 if kind == "ratios" else 2
    arguments = ["up", "--plain", "--engine", "torch", "--steps", str(steps), "--run-dir", str(run_dir)]
    done = run_command(
        [*arguments, "--task", f"python:{tmp_path / 'tasks.py'}:Task?name={task}", *small, *settings], deadline_s=120.0
    )
    assert done.code == 0, f"{done.out}\n{done.err}"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert kind in lines[-1]["warnings"] or kind in lines[-2]["warnings"], [line["warnings"] for line in lines]
    assert summary_of(run_dir)["warnings"][kind] >= 1
    assert f"sign={kind}" in (run_dir / "logs" / "trainer.log").read_text()
    assert "may not have learned" in done.out and kind in done.out
