"""`rollmesh train` on two ranks: it starts the other one, ends with it, and goes on, with fewer ranks too."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

pytest.importorskip("torch")

import torch

from services.config.load import dump_settings
from services.config.training.parallel import ParallelSettings
from tests.support.trainer_process import GROUPS, SETTINGS, SIZE, STEPS, TrainerMesh, ended, undisturbed
from trainer.checkpoint.model_folder import load_policy
from trainer.metrics.files import read_metrics
from trainer.model.learner import named_weights


def on_ranks(mesh: TrainerMesh, data: int) -> None:
    """What the next trainer is started with."""
    trainer = SETTINGS.trainer.model_copy(update={"parallel": ParallelSettings(data=data)})
    settings = SETTINGS.model_copy(update={"trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))


def is_rank(process: psutil.Process, run_id: str) -> bool:
    """One that a trainer started."""
    try:
        return f"--run-id={run_id}" in process.cmdline() and "RANK" in process.environ()
    except psutil.Error:
        return False


@pytest.mark.slow
async def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_with_one(mesh: TrainerMesh) -> None:
    batches = mesh.steps_of_groups(STEPS)
    on_ranks(mesh, 2)
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    (other,) = [each for each in psutil.Process().children(recursive=True) if is_rank(each, mesh.run_id)]
    other.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, errors = await ended(first)
    assert time.monotonic() - killed < 30.0
    assert code == 1 and "rank 1 ended with signal 9" in errors, errors
    assert "layout='2 data' rank=1" in errors

    on_ranks(mesh, 1)
    for batch in batches[3:]:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    assert "ranks: 2 data → –" in errors

    # AdamW divides by what is nearly 0 in places: sums in another order show there.
    trained, expected = (
        named_weights(load_policy(mesh.run_dir / "checkpoints" / "final")),
        undisturbed(mesh.model, [[batch] for batch in batches]),
    )
    assert trained.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-3 * float(weight.abs().max()))
    assert [line.step for line in read_metrics(mesh.run_dir / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    accounts = await mesh.ledger.accounts()
    assert accounts.trained == STEPS * GROUPS * SIZE and accounts.concluded
