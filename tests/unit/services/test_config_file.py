"""Configuration: every mistake is one line that says what and how to mend it; what is resolved can be read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config.load import dump_settings, load_settings
from services.wire.errors import UsageError


def test_overrides_come_on_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('seed = 3\n[trainer]\nlearning_rate = 1e-3\n[trainer.loss]\npolicy = "policy_gradient"\n')
    settings = load_settings(file, ["trainer.learning_rate=1e-4", "--rollout.max-tokens=7", "task=guess-number"])
    assert settings.seed == 3
    assert settings.trainer.learning_rate == 1e-4
    assert settings.trainer.loss.policy == "policy_gradient"
    assert settings.rollout.max_tokens == 7
    assert settings.task == "guess-number"


def test_an_empty_path_is_none(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('run_dir = ""\n[model]\npath = "models/mine"\n[warm_start]\ncache_dir = ""\n')
    settings = load_settings(file, ["model.path="])
    assert (settings.model.path, settings.run_dir, settings.warm_start.cache_dir) == (None, None, None)


def test_a_setting_is_read_under_its_former_name(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[trainer]\nupdates_per_batch = 2\n")
    assert load_settings(file, []).trainer.minibatches_per_batch == 2
    assert load_settings(None, ["trainer.updates_per_batch=3"]).trainer.updates_per_batch == 3


def test_the_resolved_tree_reads_back_the_same(tmp_path: Path) -> None:
    settings = load_settings(None, ["run_dir=/tmp/x", "k=0", "trainer.betas=[0.8, 0.9]"])
    file = tmp_path / "config.toml"
    file.write_text(dump_settings(settings))
    assert load_settings(file, []) == settings


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ("trainer.optimizer.muon.momentum=0.9", "no effect under optimizer.kind=adamw"),
        ("trainer.optimizer.decay_norms_and_biases=true", "no effect under weight_decay=0"),
        ("trainer.epochs_per_batch=4", "minibatches_per_batch=1 with trainer.epochs_per_batch=4 cannot be under k=2"),
        ("trainer.epochs_per_batch=2 steps=7", "steps=7 would end a run within an epoch: a batch has 2 steps"),
        (
            "trainer.epochs_per_batch=2 trainer.on_anomaly=skip",
            "on_anomaly=skip cannot be with trainer.epochs_per_batch=2",
        ),
        ("trainer.updates_per_batch=2 trainer.minibatches_per_batch=2", "is the former name of"),
        ("trainer.schedule.floor=0.1", "no effect under schedule.kind=constant"),
        ("trainer.schedule.kind=cosine trainer.schedule.decay_share=0.1", "no effect under schedule.kind=cosine"),
        (
            "trainer.schedule.kind=linear steps=5",
            "schedule linear cannot decay from step 5 of 5 on after a warm-up of 5",
        ),
        ("trainer.schedule.kind=wsd trainer.schedule.decay_share=0.96", "schedule wsd cannot decay from step 2 of 60"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(None, overrides.split())
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (
            "trainer.lerning_rate=1",
            "unknown key 'trainer.lerning_rate': the nearest known key is 'trainer.learning_rate'",
        ),
        ("trainer.micro_batch=64", "'trainer.micro_batch' is gone: write trainer.micro_batch_tokens"),
        ("trainer.minibatches_per_batch=4", "cannot be under k=2: a batch is sampled before its first step"),
        ("tsak=running-sums", "unknown key 'tsak': the nearest known key is 'task'"),
        ("trainer.lr=1", "the nearest known key is 'trainer.learning_rate'"),
        ("lr=1", "or 'trainer.learning_rate'"),
        ("learning_rate=1", "the nearest known key is 'trainer.learning_rate'"),
        ("task=running-sum", "task = 'running-sum' cannot be: did you mean 'running-sums'?"),
        ("engine=tensorrt", "known: auto, torch, vllm"),
        ("k=-1", "k = -1 cannot be: write 0 or more"),
        ("trainer.loss.anchor=behavior", "did you mean 'behaviour'?"),
        ("trainer=3", "'trainer' is a section, not a value"),
        ("k", "'k' is no override: write section.key=value"),
        ("seed=abc", "seed = 'abc' cannot be"),
    ],
)
def test_a_mistake_is_named_with_its_mend(override: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(None, [override])
    message = str(caught.value)
    assert complaint in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the configuration .*none\.toml"):
        load_settings(tmp_path / "none.toml", [])
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 3")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_settings(broken, [])
