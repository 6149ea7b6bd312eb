"""`rollmesh train`, killed, stopped and restarted: in the end the same bytes as a run that nobody disturbed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from services.config.load import dump_settings  # noqa: E402
from services.config.training.optimizer import OptimizerSettings, ScheduleSettings  # noqa: E402
from services.wire.run_metrics import TrainerReport  # noqa: E402
from tests.support.kept_rollouts import read_samples  # noqa: E402
from tests.support.trainer_process import GROUPS, SETTINGS, SIZE, STEPS, TrainerMesh, ended, undisturbed  # noqa: E402
from tests.support.trajectories import a_rollout, a_segment, grouped, random_trajectories  # noqa: E402
from tests.weight_parts import eventually  # noqa: E402
from trainer.checkpoint.model_folder import load_policy  # noqa: E402
from trainer.metrics.files import read_metrics  # noqa: E402
from trainer.model.learner import named_weights  # noqa: E402
from trainer.model.roles import make_roles  # noqa: E402
from trainer.model.train_batch import train_batch  # noqa: E402


async def test_killed_stopped_and_restarted_a_run_ends_with_the_same_bytes(mesh: TrainerMesh, one_thread: None) -> None:
    batches = mesh.steps_of_groups(STEPS)
    # The last sibling of a group never comes: its step, which is repeated after the kill, goes without it again.
    batches[2].pop()
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    assert (await mesh.waits())["trainer"] == f"the batch of step 4: groups 0/{GROUPS} ready"
    first.send_signal(signal.SIGKILL)
    await ended(first)
    (mesh.run_dir / "metrics.jsonl").open("ab").write(b'{"torn')

    await mesh.writer.publish(batches[3])
    second = mesh.trainer()
    await mesh.until(4, second)
    second.send_signal(signal.SIGTERM)
    code, errors = await ended(second)
    assert code == 128 + signal.SIGTERM, errors
    assert (mesh.run_dir / "checkpoints" / "step-00000004" / "meta.json").exists()

    for batch in batches[4:]:
        await mesh.writer.publish(batch)
    future = a_segment([5], [6], [-1.0], [STEPS + 1])
    await mesh.writer.publish([a_rollout([future], 1.0, run_id=mesh.run_id, group="future", ordinal=98)])
    await mesh.writer.publish(random_trajectories(99, groups=1, size=SIZE, run_id=mesh.run_id, first_ordinal=99))
    third = mesh.trainer()
    code, errors = await ended(third)
    assert code == 0, errors

    expected = undisturbed(mesh.model, [[batch] for batch in batches])
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())

    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    assert report.keys() == set(TrainerReport.__struct_fields__)
    assert (report["steps"], report["final_version"], report["weights_digest_match"]) == (STEPS, STEPS, True)
    assert report["max_staleness"] == STEPS - 1
    assert mesh.engine.receiver.version == STEPS
    assert [line.step for line in read_metrics(mesh.run_dir / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    assert (mesh.run_dir / "curves.png").stat().st_size > 0
    accounts = await mesh.ledger.accounts()
    assert accounts.trained == STEPS * GROUPS * SIZE - 1
    kept = [(sample.step, sample.group, sample.member) for sample in read_samples(mesh.run_dir)]
    assert {step for step, _, _ in kept} == {*range(1, STEPS + 1)}
    assert len(kept) == len(set(kept)) == accounts.trained, "none is there twice, and none is missing"
    assert (report["lost_siblings"], report["dropped"]) == (1, accounts.dropped)
    assert (report["lengths_trained"]["episodes"], report["lengths_generated"]["episodes"]) == (
        accounts.trained,
        accounts.published,
    )
    assert accounts.dropped == {"run_concluded": SIZE, "future_version": 1}
    assert accounts.published == accounts.trained + accounts.dropped_total()
    assert (accounts.concluded, accounts.final_version) == (True, STEPS)


def nudge(checkpoint: Path) -> None:
    """Have the steps that are repeated from a checkpoint come to other bytes, as the kernels of a GPU may."""
    path = checkpoint / "model.safetensors"
    nudged = {name: weight + 1e-6 for name, weight in load_file(path).items()}
    save_file(nudged, path, metadata={"format": "pt"})


async def test_a_restart_that_comes_to_other_bytes_goes_on_under_a_version_above(mesh: TrainerMesh) -> None:
    batches = mesh.steps_of_groups(STEPS)
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    await eventually(lambda: mesh.engine.receiver.version == 3, deadline_s=30)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    nudge(mesh.run_dir / "checkpoints" / "step-00000002")
    for batch in batches[3:]:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    assert "conflict" not in errors.lower()
    (warning,) = [line for line in errors.splitlines() if "going on under another version" in line]
    assert "from_version=3" in warning and "to_version=4" in warning

    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    assert (report["steps"], report["final_version"], report["weights_digest_match"]) == (STEPS, STEPS + 1, True)
    assert report["max_staleness"] <= SETTINGS.k
    assert mesh.engine.receiver.version == STEPS + 1
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [(line.step, line.version) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 5), (5, 6), (6, 7)]
    accounts = await mesh.ledger.accounts()
    assert (accounts.trained, accounts.skipped_groups) == (STEPS * GROUPS * SIZE, GROUPS)
    assert (accounts.concluded, accounts.final_version) == (True, STEPS + 1)


@pytest.mark.slow
async def test_several_steps_a_batch_are_made_again_and_published_once(mesh: TrainerMesh, one_thread: None) -> None:
    """Batches of two steps and a last one of one; killed between them, a run ends with the bytes of one in one go."""
    steps = 5
    trainer = SETTINGS.trainer.model_copy(update={"minibatches_per_batch": 2, "checkpoint_every": 3})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    parts = mesh.steps_of_groups(steps)
    for part in parts[:3]:
        await mesh.writer.publish(part)
    first = mesh.trainer()
    await mesh.until(2, first)
    assert (await mesh.waits())["trainer"] == f"the batch of steps 3 to 4: groups {GROUPS}/{2 * GROUPS} ready"
    await eventually(lambda: mesh.engine.receiver.version == 2, deadline_s=30)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    for part in parts[3:]:
        await mesh.writer.publish(part)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors

    expected = undisturbed(mesh.model, [parts[:2], parts[2:4], parts[4:]])
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [line.step for line in lines] == [*range(1, steps + 1)]
    assert [line.groups for line in lines] == [GROUPS] * steps
    assert [line.staleness_max for line in lines] == [*range(steps)]
    assert [line.publish_ms > 0.0 for line in lines[2:]] == [False, True, True]
    assert (mesh.run_dir / "checkpoints" / "step-00000004" / "meta.json").exists(), "the first end of a batch after 3"
    assert mesh.engine.receiver.version == steps
    assert (await mesh.ledger.accounts()).trained == steps * GROUPS * SIZE


@pytest.mark.slow
async def test_epochs_of_muon_on_a_schedule_are_made_again_and_each_trajectory_counts_once(
    mesh: TrainerMesh, one_thread: None
) -> None:
    """Two minibatches, two epochs: four steps a batch. Killed after the first, of which no checkpoint holds a step."""
    steps = 8
    trainer = SETTINGS.trainer.model_copy(
        update={
            "minibatches_per_batch": 2,
            "epochs_per_batch": 2,
            "checkpoint_every": 20,
            "optimizer": OptimizerSettings(kind="muon"),
            "schedule": ScheduleSettings(kind="cosine", floor=0.1),
        }
    )
    settings = SETTINGS.model_copy(update={"steps": steps, "k": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    parts = mesh.steps_of_groups(4)
    for part in parts[:2]:
        await mesh.writer.publish(part)
    first = mesh.trainer()
    await mesh.until(4, first)
    assert (await mesh.waits())["trainer"] == f"the batch of steps 5 to 8: groups 0/{2 * GROUPS} ready"
    await eventually(lambda: mesh.engine.receiver.version == 4, deadline_s=30)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    for part in parts[2:]:
        await mesh.writer.publish(part)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors

    roles = make_roles(lambda: load_policy(mesh.model), settings, 0)
    made = [train_batch(roles, settings, grouped(parts[at] + parts[at + 1]), 4) for at in (0, 2)]
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in roles.learner.weights().items())
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [(line.step, line.epoch) for line in lines] == [*zip(range(1, 9), [1, 1, 2, 2] * 2, strict=True)]
    assert [line.staleness_max for line in lines] == [*range(steps)]
    assert [line.learning_rate for line in lines] == [step.learning_rate for batch in made for step in batch]
    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    accounts = await mesh.ledger.accounts()
    assert accounts.trained == report["trajectories_trained"] == report["lengths_trained"]["episodes"]
    assert accounts.trained == 4 * GROUPS * SIZE
