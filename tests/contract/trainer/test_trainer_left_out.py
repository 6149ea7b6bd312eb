"""Batches that cannot be trained: they reach no engine and no checkpoint, and can be left out."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from services.config.load import dump_settings  # noqa: E402
from services.config.training.algorithm import LossSettings  # noqa: E402
from services.run_store.stream import DeadLetters  # noqa: E402
from tests.support.fragile_loss import BROKEN, NAME, NOT_FINITE, marked  # noqa: E402
from tests.support.trainer_process import GROUPS, SETTINGS, SIZE, TrainerMesh, ended  # noqa: E402
from tests.support.trajectories import grouped  # noqa: E402
from trainer.checkpoint.checkpoint import versions  # noqa: E402
from trainer.checkpoint.model_folder import load_policy  # noqa: E402
from trainer.checkpoint.recovery import LIVES  # noqa: E402
from trainer.metrics.files import read_metrics  # noqa: E402
from trainer.model.learner import named_weights  # noqa: E402
from trainer.model.roles import make_roles  # noqa: E402
from trainer.model.train_batch import train_batch  # noqa: E402


@pytest.mark.slow
async def test_a_batch_that_is_not_finite_reaches_no_engine_and_no_checkpoint_and_can_be_left_out(
    mesh: TrainerMesh, one_thread: None
) -> None:
    steps = 4
    trainer = SETTINGS.trainer.model_copy(update={"loss": LossSettings(policy=NAME), "checkpoint_every": 1})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    batches = mesh.steps_of_groups(steps + 1)
    batches[2] = marked(batches[2], NOT_FINITE)
    for batch in batches:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 2 and "step 3 is not made: the loss of the policy is nan" in errors.splitlines()[-1], errors
    assert (mesh.run_dir / "anomalies" / "version-00000002-anomaly" / "batch.msgpack").exists()
    assert mesh.engine.receiver.version <= 2
    assert max(versions(mesh.run_dir / "checkpoints")) == 2
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [(line.step, line.packed_ahead) for line in lines] == [(1, False), (2, True)], "all batches were there"

    trainer = trainer.model_copy(update={"on_anomaly": "skip", "learning_rate": 1e-4})
    changed = settings.model_copy(update={"trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(changed))
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    assert mesh.engine.receiver.version == steps
    roles = make_roles(lambda: load_policy(mesh.model), settings, 0)
    for index, batch in enumerate(batches):
        if index != 2:
            train_batch(roles, settings if index < 2 else changed, grouped(batch), 1)
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in roles.learner.weights().items())
    accounts = await mesh.ledger.accounts()
    assert (accounts.trained, accounts.dropped) == (steps * GROUPS * SIZE, {"anomaly": GROUPS * SIZE})
    assert (accounts.published, accounts.dropped_groups) == (accounts.trained + accounts.dropped_total(), GROUPS)
    assert sum(line.dropped.get("anomaly", 0) for line in read_metrics(mesh.run_dir / "metrics.jsonl")) == GROUPS * SIZE


@pytest.mark.slow
async def test_a_batch_that_ends_the_trainer_each_time_is_left_out_after_three_lives(mesh: TrainerMesh) -> None:
    steps = 2
    trainer = SETTINGS.trainer.model_copy(update={"loss": LossSettings(policy=NAME)})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    batches = mesh.steps_of_groups(steps + 1)
    batches[1] = marked(batches[1], BROKEN)
    for batch in batches:
        await mesh.writer.publish(batch)
    for _ in range(LIVES):
        code, errors = await ended(mesh.trainer())
        assert code == 1 and "no kernel for this batch" in errors, errors
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    accounts = await mesh.ledger.accounts()
    assert (accounts.trained, accounts.dropped) == (steps * GROUPS * SIZE, {"untrainable": GROUPS * SIZE})
    assert (accounts.published, accounts.dropped_groups) == (accounts.trained + accounts.dropped_total(), GROUPS)
    letters = await DeadLetters(mesh.redis, mesh.run_id).newest(1)
    assert "ended the trainer 3 times (RuntimeError: no kernel for this batch)" in letters[0].why
    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    assert (report["final_version"], report["weights_digest_match"]) == (steps, True)
