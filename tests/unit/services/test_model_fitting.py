"""Settings that suit a model of the user's: which, when, what stays, and where the run's file says they came from."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.config.fitting import annotated, as_begun, fit, read_facts, value_of
from services.config.load import dump_settings, load_settings, origins_of
from services.policies.training.model_defaults import ModelFacts, fitting
from services.wire.errors import UsageError

SMOL = ModelFacts(134_515_008, 8192)
LARGE = ModelFacts(8_000_000_000, 40960)


def test_a_small_model_keeps_the_defaults_and_a_real_one_gets_what_suits_it() -> None:
    assert fitting(ModelFacts(3_500_000, 512), adapters=False, gpu=True) == {}
    settings, found = fit(load_settings(None, []), SMOL, cores=2, gpu=False)
    assert value_of(settings, "trainer.learning_rate") == 2e-5
    assert value_of(settings, "rollout.max_tokens") == 1024
    assert value_of(settings, "model.dtype") == "float32"
    assert value_of(settings, "weights.stage_timeout_s") == 35.0
    assert value_of(settings, "rollout.start_timeout_s") == 1816.0
    assert found["trainer.learning_rate"] == "for 135 million parameters"
    assert value_of(settings, "trainer.threads") == 2


def test_a_larger_model_learns_at_a_smaller_rate_and_adapters_at_ten_times_that() -> None:
    whole = fitting(LARGE, adapters=False, gpu=True)
    adapted = fitting(LARGE, adapters=True, gpu=True)
    assert whole["trainer.learning_rate"].value == 2.6e-6
    assert adapted["trainer.learning_rate"].value == pytest.approx(2.6e-5)
    assert whole["model.dtype"].value == "bfloat16"
    assert fitting(ModelFacts(10**12), adapters=False, gpu=True)["trainer.learning_rate"].value == 1e-6


def test_what_somebody_set_stays_even_at_the_default_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[rollout]\nmax_tokens = 24\n")
    settings, found = fit(load_settings(file, ["trainer.learning_rate=5e-4"]), SMOL, cores=2, gpu=False)
    assert value_of(settings, "rollout.max_tokens") == 24
    assert value_of(settings, "trainer.learning_rate") == 5e-4
    assert not {"rollout.max_tokens", "trainer.learning_rate"} & found.keys()


def test_the_runs_file_says_where_each_value_comes_from_and_reads_as_before(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("steps = 7\n[rollout]\ngroup_size = 4\n[trainer]\nupdates_per_batch = 2\n")
    overrides = ["rollout.max_tokens=9", 'task="guess-number"']
    asked = load_settings(file, overrides)
    settings, found = fit(asked, SMOL, cores=2, gpu=False)
    text = annotated(dump_settings(settings), {**origins_of(file, overrides), **found})
    lines = text.splitlines()
    assert "steps = 7  # mine.toml" in lines
    assert "group_size = 4  # mine.toml" in lines
    assert "minibatches_per_batch = 2  # mine.toml" in lines
    assert "max_tokens = 9  # command line" in lines
    assert "learning_rate = 2e-05  # for 135 million parameters" in lines
    assert "servers = 1  # default" in lines
    unmarked = [line for line in lines if " = " in line and "#" not in line and not line.endswith("= [")]
    assert unmarked == []
    assert tomllib.loads(text) == tomllib.loads(dump_settings(settings))


def test_a_run_is_not_another_because_the_machine_is() -> None:
    asked = load_settings(None, [])
    begun, _ = fit(asked, SMOL, cores=8, gpu=True)
    assert fit(asked, SMOL, cores=2, gpu=False)[0] != begun
    assert as_begun(asked, begun) == begun
    assert as_begun(load_settings(None, ["rollout.max_tokens=5"]), begun) != begun


def test_facts_are_read_from_the_files_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no causal language model"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    assert read_facts(tmp_path) == ModelFacts(0, 77), "its loader says what it lacks"
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, tmp_path / "x.safetensors")
    save_file({"c": np.zeros((2, 2, 2), np.float32)}, tmp_path / "y.safetensors")
    assert read_facts(tmp_path) == ModelFacts(25, 77)
