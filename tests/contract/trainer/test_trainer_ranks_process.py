"""`rollmesh train` on two ranks: it starts the other one, ends with it, and goes on, with fewer ranks too."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

torch = pytest.importorskip("torch")

from services.config.load import dump_settings  # noqa: E402
from services.config.parallel import ParallelSettings  # noqa: E402
from tests.contract.trainer.test_trainer_process import (  # noqa: E402
    GROUPS,
    SETTINGS,
    SIZE,
    STEPS,
    Mesh,
    ended,
    mesh,
    undisturbed,
)
from trainer.checkpoint.model_folder import load_policy  # noqa: E402
from trainer.metrics.files import read_metrics  # noqa: E402
from trainer.model.learner import named_weights  # noqa: E402

__all__ = ["mesh"]


def on_ranks(mesh: Mesh, data: int) -> None:
    """What the next trainer is started with."""
    trainer = SETTINGS.trainer.model_copy(update={"parallel": ParallelSettings(data=data)})
    settings = SETTINGS.model_copy(update={"trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))


async def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_with_one(mesh: Mesh) -> None:
    batches = mesh.steps_of_groups(STEPS)
    on_ranks(mesh, 2)
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    # Twice the imports.
    await mesh.until(3, first, within_s=240.0)
    (other,) = psutil.Process(first.pid).children()
    os.kill(other.pid, signal.SIGKILL)
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
