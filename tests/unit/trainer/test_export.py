"""`rollmesh export`: a checkpoint's weights as a folder that others load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.config.load import dump_settings, load_settings
from services.config.settings import RunSettings
from tests.support.forked_command import run_forked
from tests.support.trajectories import grouped, random_trajectories
from trainer.checkpoint import checkpoint
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import train_batch
from trainer.sft.tiny_model import build_model, save_policy


def a_run(folder: Path, *overrides: str) -> tuple[RunSettings, Roles]:
    """A run of two steps with a checkpoint of each, as its trainer leaves it."""
    base = folder / "base"
    save_policy(build_model(seed=5, hidden_size=32, layers=1), base)
    settings = load_settings(None, [f"model.path={base}", "k=99", *overrides])
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump_settings(settings))
    roles = make_roles(lambda: AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings, 0)
    for seed in (1, 2):
        train_batch(roles, settings, grouped(random_trajectories(seed, groups=2, size=3)), 1)
        checkpoint.save(run / "checkpoints", checkpoint.snapshot(roles, "r", "f"))
    return settings, roles


@pytest.mark.parametrize("rank", [0, 4])
def test_the_newest_checkpoint_is_exported_in_the_serving_dtype(tmp_path: Path, rank: int) -> None:
    _, roles = a_run(tmp_path, "model.dtype=bfloat16", f"trainer.lora.rank={rank}", "trainer.learning_rate=1e-2")
    done = run_forked(["export", str(tmp_path / "run"), "--shard-mib", "1"], tmp_path)
    assert done.code == 0, done.err
    folder = Path(done.out.strip())
    assert folder == tmp_path / "run" / "export-2"
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    published = {name: weight for name, weight in roles.learner.published().items()}
    for name, weight in exported.state_dict().items():
        assert weight.dtype == torch.bfloat16
        if name in published:
            wanted = published[name]
            whole = wanted if isinstance(wanted, torch.Tensor) else wanted.compute()
            assert torch.equal(weight, whole.detach().to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(folder)("12").input_ids


def test_an_earlier_checkpoint_in_float32_is_what_it_was(tmp_path: Path) -> None:
    _, roles = a_run(tmp_path)
    run, out = tmp_path / "run", tmp_path / "out"
    done = run_forked(["export", str(run), "--at", "1", "--out", str(out)], tmp_path)
    assert done.code == 0, done.err
    first = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    newest = roles.learner.model.state_dict()
    assert {weight.dtype for weight in first.values()} == {torch.float32}
    assert any(not torch.equal(weight, newest[name]) for name, weight in first.items())
    again = run_forked(["export", str(run), "--at", "1", "--out", str(out)], tmp_path)
    assert (again.code, "is there already" in again.err) == (2, True)
    unknown = run_forked(["export", str(run), "--at", "7"], tmp_path)
    assert unknown.code != 0 and "there are: 1, 2" in unknown.err
    nowhere = run_forked(["export", str(tmp_path)], tmp_path)
    assert (nowhere.code, "is no run folder" in nowhere.err) == (2, True)
