"""Mistakes that people make at the command line: one line that names the wrong value and how to mend it, exit code 2."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import ROLLMESH


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with what the command lines below name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLMESH_LOG_JSON", "0")
    # It would set logging up for this process, onto a stream that ends with the test.
    monkeypatch.setattr("services.cli.configure_logging", lambda *_, **__: None)
    (tmp_path / "broken.toml").write_text("steps = \n")
    (tmp_path / "typed.toml").write_text('[trainer]\nlearning_rate = "fast"\n')
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.toml").write_text("")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "bare" / "model.safetensors").touch()
    (tmp_path / "weights.gguf").touch()
    return tmp_path


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


MISTAKES = [
    ("up trainer.lr=1e-4", "unknown key 'trainer.lr'", "trainer.learning_rate"),
    ("up traner.learning_rate=1e-4", "unknown key 'traner'", "nearest known key is 'trainer'"),
    ("up --step 5", "unknown key 'step'", "'steps'"),
    ("up steps 5", "'steps' is no setting", "write section.key=value"),
    ("up steps=many", "steps = 'many'", "write a whole number"),
    ("up trainer.learning_rate=fast", "trainer.learning_rate = 'fast'", "write a number"),
    ("up model.dtype=fp16", "model.dtype = 'fp16'", "did you mean 'bfloat16'?"),
    ("up --k=-1", "k = -1", "write 0 or more"),
    ("up --k 2.5", "k = 2.5", "write a whole number"),
    ("up trainer.minibatches_per_batch=9", "trainer.minibatches_per_batch=9 cannot be under k=2", "set k=8 or more"),
    ("up rollout.group_size=1", "rollout.group_size = 1", "write 2 or more"),
    ("up servers=0", "servers = 0", "write 1 or more"),
    (
        "up model.path=no/such/folder",
        "no/such/folder is no Hugging Face model folder",
        "set model.path to such a folder",
    ),
    ("up model.path=weights.gguf", "weights.gguf is no Hugging Face model folder", "it must hold a config.json"),
    ("up model.path=bare", "bare holds no tokenizer", "save_pretrained"),
    ("models fetch qwen3", "'qwen3' is no model's name", "owner/name"),
    ("up --engine vlm", "engine = 'vlm'", "did you mean 'vllm'?"),
    ("up --task runing-sums", "task = 'runing-sums'", "did you mean 'running-sums'?"),
    ("up --task ./mine.py:Larger?n=2", "task = './mine.py:Larger?n=2'", "did you mean python:./mine.py:Larger?n=2?"),
    ("up --task sums", "no demonstrations", "model.path=smollm2-135m"),
    ("up --task python:none.py:make", "there is no file", "correct its path"),
    ("up --recipe smolm2", "no recipe 'smolm2'", "did you mean 'smollm2'?"),
    ("up --config broken.toml", "broken.toml is not valid TOML", "at line 1"),
    ("up --config typed.toml", "trainer.learning_rate = 'fast'", "write a number"),
    ("up --config none.toml", "cannot read the configuration none.toml", "check the path"),
    ("up --config typed.toml --recipe smollm2", "--recipe and --config", "give one of them"),
    ("up --run-dir taken", "taken holds a run already", "choose another --run-dir"),
    ("up --check --resume none", "--check looks at a run that is new", "leave --resume or --check out"),
    ("up --resume none", "none holds no run", "name its run folder"),
    ("up telemetry.trainer_port=USED", "cannot listen on 127.0.0.1:USED", "choose another port"),
    ("gateway --run-id a --port 70000", "'--port'", "less than or equal to 65535"),
    ("weight-bus --run-id a --port USED", "cannot listen on", "choose another port"),
    ("up --redis-url localhost:6379", "'localhost:6379' is no Redis address", "write redis://host:port/0"),
    ("up --redis-url redis://127.0.0.1:1/0", "no Redis answers at redis://127.0.0.1:1/0", "leave --redis-url out"),
    ("up --redis-url redis://:secret@127.0.0.1:1/0", "the Redis address holds a password", "give it by file"),
    ("up --keys-dir none", "there is no folder of keys none", "rollmesh keys init none"),
    ('up tracking.backends=["tensorbord"]', "'tensorbord'", "'tensorboard'"),
    ("up trainer.loss.policy=ppo_clp", "trainer.loss.policy=ppo_clp is not known", "did you mean 'ppo_clip'?"),
    ("up trainer.advantage.estimator=grpoo", "trainer.advantage.estimator=grpoo is not known", "did you mean 'grpo'?"),
    ("up weights.transport=rdma", "weights.transport = 'rdma'", "known: auto, nixl"),
    ("up rollout.vllm.max_model_len=512 --engine torch", "rollout.vllm.max_model_len is not read", "set engine=vllm"),
    ("eval --problems 8", "nothing is named that could answer", "name a run folder"),
    ("eval --at best", "--at names a checkpoint of a run", "name the run with --checkpoint"),
    ("samples none", "none is no run folder", "`rollmesh runs` lists them"),
    ("weights status --bus-url localhost", "'localhost' is no address of a service", "write http://HOST:PORT"),
    ("export --run-dir none", "No such option: --run-dir", "`rollmesh export --help`"),
    ("trian", "no command 'trian'", "did you mean 'train'?"),
    ("doctor none", "none is no run folder", "`rollmesh runs` lists them"),
    ("doctor taken servers=0", "taken is a run, and settings are given", "give one of them"),
]


@pytest.mark.parametrize(("line", "wrong", "mend"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_line_with_what_and_how_to_mend_it(
    line: str, wrong: str, mend: str, used_port: int, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    line, wrong = line.replace("USED", str(used_port)), wrong.replace("USED", str(used_port))
    code = ROLLMESH.run(line.split())
    said = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(said) == 1, said
    assert said[0].startswith("rollmesh: ")
    assert wrong in said[0]
    assert mend in said[0]
    assert not (folder / "runs").exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("line", "library", "extra"),
    [
        ("up trainer.lora.rank=8", "peft", ".[lora]"),
        ("up trainer.optimizer.state_bits=8", "bitsandbytes", ".[adam8bit]"),
        ('up tracking.backends=["wandb"]', "wandb", ".[trackers]"),
        ("up --engine vllm", "vllm", ".[vllm-"),
        ("up --engine torch", "torch", ".[torch]"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    line: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == library else found(name, *rest)
    )
    assert ROLLMESH.run(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert extra in said


def test_a_refusal_that_is_only_looked_for_is_a_finding_too(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert ROLLMESH.run(["up", "--check", "model.path=bare"]) == 2
    finding = json.loads(capsys.readouterr().out)
    assert (finding["id"], finding["runbook"]) == ("tokenizer", "docs/runbook.md#tokenizer")
    assert ROLLMESH.run(["up", "--check"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("the run can start: running-sums,")) == ("", True), said.err
    assert not (folder / "runs").exists()
