"""`rollmesh train` as a process: what it refuses, how it stops, what it gives back to Redis."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from services.config.load import dump_settings
from services.config.settings import RunStoreSettings
from services.run_store.keys import RunKeys
from tests.support.trainer_process import SETTINGS, TrainerMesh, ended
from tests.support.until import until
from tests.weight_parts import eventually


async def test_a_trainer_frees_a_redis_that_fills_long_before_a_checkpoint_is_due(mesh: TrainerMesh) -> None:
    trainer = SETTINGS.trainer.model_copy(update={"checkpoint_every": 1000})
    settings = SETTINGS.model_copy(update={"trainer": trainer, "run_store": RunStoreSettings(max_bytes=1 << 20)})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    process, published = mesh.trainer(), 0
    for step, batch in enumerate(mesh.steps_of_groups(4), start=1):
        await mesh.writer.publish(batch)
        published += len(batch)
        await mesh.until(step, process)

    async def trimmed() -> bool:
        return await mesh.redis.xlen(RunKeys(mesh.run_id).stream) < published

    await until(trimmed, 30.0)
    process.send_signal(signal.SIGKILL)
    await ended(process)


async def test_a_trainer_that_still_waits_for_its_model_stops_at_once(mesh: TrainerMesh) -> None:
    mesh.model = mesh.run_dir / "never made"
    trainer = mesh.trainer()
    log = mesh.run_dir / "checkpoints" / "steps.jsonl"
    await eventually(log.exists, deadline_s=60)
    trainer.send_signal(signal.SIGTERM)
    code, errors = await asyncio.wait_for(ended(trainer), timeout=10)
    assert code == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors


async def test_a_refused_loss_is_one_line_and_needs_no_mesh(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[trainer.loss.correction]\nweight = "token"\n')
    flags = ["--run-id", "r", "--config", str(config), "--redis-url", "redis://127.0.0.1:1", "--bus-url", "http://x"]
    command = [sys.executable, "-m", "services", "train", *flags, "--model", "m", "--run-dir", str(tmp_path)]
    answer = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "correct twice" in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
