"""A run that cannot learn says why within its first steps: planted causes, through the whole mesh."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh_command import Finished, Running, run_command, running_up, summary_of
from trainer.sft.tiny_model import build_model, build_tokenizer, save_policy

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TASKS = '''
import asyncio
from pathlib import Path

from clients.environments.base import Ended, Problem, agent_environment

class Task:
    """One answer to a number; what it is worth may be the cause that is planted."""

    def __init__(self, name="plain"):
        self.name = name

    def problem(self, split, index, seed):
        return Problem(split, index, prompt=f"{index % 7}{index % 5}=")

    def start(self, problem):
        return Episode(self.name, problem.prompt)

class Episode:
    def __init__(self, name, prompt):
        self.name, self.first_turn = name, prompt

    def respond(self, answer):
        odd = len(answer.text) % 2 == 1
        return Ended(1e7 * odd if self.name == "huge" else float(odd), success=False)

TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {}}}

def foreign(split, index, seed):
    return Problem(split, index, prompt="漢字=")

async def play(problem, endpoint):
    from openai import AsyncOpenAI
    while problem.index >= 8 and not Path(__file__).with_name("go-on").exists():
        await asyncio.sleep(0.05)
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        asked = [{"role": "user", "content": problem.prompt}]
        await client.chat.completions.create(model="policy", messages=asked, tools=[TOOL])
    return Ended(0.0, success=False)

hopeless = agent_environment("hopeless", foreign, play)
'''
OWN_MODEL = '''
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own_sums"

class OwnForCausalLM(Qwen3ForCausalLM):
    """Other logits where it is trained than where it is served."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda norm, args, out: out * (8 if norm.weight.requires_grad else 1))
'''
FAR = ["trainer.learning_rate=0.3", "trainer.warmup_steps=0", "trainer.advantage.std=false"]
PLANTED = [
    (["entropy"], "plain", ["rollout.temperature=0.01"]),
    # Rewards that are far too large, and a learning rate that is.
    (["gradient", "ratios"], "huge", FAR),
    (["disagreement"], "plain", ["model.trust_remote_code=true"]),
]


def plant(folder: Path, kind: str) -> None:
    """The tasks, and a model in which the cause is, where it is one of the model."""
    (folder / "tasks.py").write_text(TASKS)
    model = build_model(seed=5, hidden_size=32, layers=1)
    if kind == "entropy":
        # A fresh model's logits are so close to each other that even this temperature leaves a choice.
        model.get_output_embeddings().weight.data *= 30
    save_policy(model, folder / "model")
    if kind == "disagreement":
        config = json.loads((folder / "model" / "config.json").read_text())
        config["model_type"] = "own_sums"
        config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        (folder / "model" / "config.json").write_text(json.dumps(config))
        (folder / "model" / "own.py").write_text(OWN_MODEL)


def arguments_of(folder: Path, task: str, steps: int, settings: Sequence[str]) -> list[str]:
    small = [f"model.path={folder / 'model'}", "evaluation.problems=4", "rollout.groups_per_step=4"]
    return [
        "--engine",
        "torch",
        "--steps",
        str(steps),
        "--task",
        f"python:{folder / 'tasks.py'}:{task}",
        *small,
        *settings,
    ]


def named(kind: str, run_dir: Path, done: Finished, lines: Sequence[dict[str, Any]]) -> None:
    """The cause is named in one of these lines of metrics.jsonl, in summary, log and last table."""
    assert any(kind in line["warnings"] for line in lines), lines
    assert summary_of(run_dir)["warnings"][kind] >= 1
    assert f"sign={kind}" in (run_dir / "logs" / "trainer.log").read_text()
    assert "may not have learned" in done.out and kind in done.out


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trainer_in_status(mesh: Running, redis_url: str, steps: int) -> dict[str, Any]:
    """What `rollmesh status` says of the trainer once it has told of so many steps: it does so every second or two."""
    ends = time.monotonic() + 120.0
    while True:
        asked = run_command(["status", "--redis-url", redis_url, "--run-id", mesh.run_id(), "--json"])
        told: dict[str, Any] | None = json.loads(asked.out)["trainer"]
        if told is not None and told["step"] >= steps:
            return told
        assert time.monotonic() < ends, asked.out


def live_view_until(mesh: Running, expected: Sequence[str]) -> str:
    """Its lines up to the one in which the last of these texts is."""
    assert mesh.process.stdout is not None
    seen = ""
    while not all(text in seen for text in expected):
        line = mesh.process.stdout.readline()
        assert line, f"ended early:\n{seen}\n{mesh.logs()}"
        seen += line
    return seen


@pytest.mark.parametrize(("kinds", "task", "settings"), PLANTED, ids=[" ".join(kinds) for kinds, *_ in PLANTED])
def test_a_planted_cause_is_named(
    kinds: list[str], task: str, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers copies a folder's code into its cache.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    plant(tmp_path, kinds[0])
    # Off-policy tokens come with the second step; what chance may bring about is named at the second one that shows it.
    steps = 4 if "ratios" in kinds else 2
    run_dir = tmp_path / "run"
    arguments = arguments_of(tmp_path, f"Task?name={task}", steps, settings)
    done = run_command(["up", "--plain", "--run-dir", str(run_dir), *arguments], deadline_s=120.0)
    assert done.code == 0, f"{done.out}\n{done.err}"
    for kind in kinds:
        named(kind, run_dir, done, lines_of(run_dir)[-2:])


def test_four_causes_at_once_are_all_named_also_by_status_while_it_runs(tmp_path: Path, redis_url: str) -> None:
    """Rewards that are all equal, cut answers, prompts in another alphabet, tools that the template leaves out."""
    pytest.importorskip("openai")
    plant(tmp_path, "hopeless")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    run_dir, kinds = tmp_path / "run", {"no_signal", "truncated", "unknown_tokens", "unrendered_tools"}
    settings = ("rollout.max_tokens=2", "rollout.unrendered_tools=warn", "--redis-url", redis_url)
    with running_up(run_dir, *arguments_of(tmp_path, "hopeless", 3, settings)) as mesh:
        # The third step has its episodes when the file `go-on` is there.
        mesh.wait_for_steps(2)
        told = trainer_in_status(mesh, redis_url, 2)
        seen = live_view_until(mesh, [f"this run may not learn ({kind})" for kind in kinds])
        (tmp_path / "go-on").touch()
        done = mesh.finish(60.0)
    assert done.code == 0, f"{seen}{done.out}\n{done.err}"
    assert kinds <= told["warnings"].keys()
    for kind in kinds:
        named(kind, run_dir, done, lines_of(run_dir)[:2])
