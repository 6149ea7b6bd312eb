"""Models that only code of their own folder can load: refused unasked, run everywhere where it is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_server.engines.torch.core import load_decoder
from rollout_server.engines.vllm.launch import Plan, launch
from services.config.settings import ModelSettings, RunSettings
from services.host.models import check_code, code_files
from services.supervisor.preflight import with_model_folder
from services.wire.errors import UsageError
from tests.support.model_families import SMALL
from trainer.checkpoint.model_folder import load_policy
from trainer.fetch.local import find_model
from trainer.sft.tiny_model import build_tokenizer

CODE = """
import os
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path(os.environ["RAN"]).touch()


class OwnConfig(LlamaConfig):
    model_type = "own_sums"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
LOAD = """
import sys
from pathlib import Path

import torch

from rollout_server.engines.torch.core import load_decoder
from trainer.checkpoint.model_folder import load_policy, save_model

folder, copy = Path(sys.argv[1]), Path(sys.argv[2])
policy = load_policy(folder, trust_remote_code=True)
save_model(copy, policy, folder)
decoder = load_decoder(copy, torch.float32, torch.device("cpu"), trust_remote_code=True)
ids = torch.tensor([[5, 6, 7]])
torch.testing.assert_close(decoder.plain(ids), policy(ids).logits[:, -1].detach())
print(type(policy).__name__, type(decoder.weights).__name__, type(load_policy(copy, trust_remote_code=True)).__name__)
"""


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    tokenizer = build_tokenizer()
    LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": len(tokenizer)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_sums",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    return folder


def test_every_loader_refuses_in_one_line_and_names_the_setting(
    own_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    cpu, plan = torch.device("cpu"), Plan(own_model, "float32", max_running=2, seed=0)
    settings = RunSettings(model=ModelSettings(path=own_model))
    for load in (
        lambda: load_policy(own_model),
        lambda: load_decoder(own_model, torch.float32, cpu),
        lambda: launch(plan),
        lambda: find_model(own_model),
        lambda: with_model_folder(settings),
    ):
        with pytest.raises(UsageError, match=r"needs code of its own \(own\.py\)") as refused:
            load()
        assert "model.trust_remote_code=true" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()
    asked = settings.model_copy(update={"model": ModelSettings(path=own_model, trust_remote_code=True)})
    assert with_model_folder(asked).model.path == find_model(own_model, trust_remote_code=True) == own_model


def test_where_it_is_asked_for_trainer_and_engine_run_it_and_checkpoints_carry_it(
    own_model: Path, tmp_path: Path
) -> None:
    # In a process of its own: transformers copies the code into a cache that is chosen when it is imported.
    environ = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "RAN": str(tmp_path / "ran")}
    command = [sys.executable, "-P", "-c", LOAD, str(own_model), str(tmp_path / "copy")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == [" ".join(["OwnForCausalLM"] * 3)], done.stderr
    assert (tmp_path / "ran").exists()


def test_a_type_that_transformers_knows_needs_no_code(own_model: Path, tmp_path: Path) -> None:
    config = json.loads((own_model / "config.json").read_text())
    assert code_files(own_model) == {"own.py"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    check_code(tmp_path, trusted=False)
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {}}))
    check_code(tmp_path, trusted=False)
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "me/other--far.Model"}}))
    assert code_files(tmp_path) == {"far.py"}
