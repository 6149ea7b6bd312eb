"""How long a trainer has to end its step and write a checkpoint, and what is told of it meanwhile.

Its steps so far (metrics.jsonl) and the last checkpoint's size, or the model's, say how long both take
(`services.policies.training.deadlines`): a model of hundreds of gigabytes is not killed while it is written.
"""

from __future__ import annotations

from pathlib import Path

from services.config.model_folder import weight_file_bytes
from services.host.aio import telling
from services.host.files import LineTail
from services.host.run_folder import RunFolder
from services.policies.training.deadlines import stopped_within
from services.supervisor.processes import ManagedProcess, Say
from services.wire.run_metrics import decode_step_metrics

_STEPS = 64
_GROWS = 6
"""Bytes of a checkpoint by those of the model folder: weights and two moments in float32, the folder in bfloat16."""
_BEGUN = (".making-*", ".parts-*")
"""Checkpoints that one rank, or several, are writing."""
_GB = 1e9


async def stop_trainer(
    managed: ManagedProcess, least_s: float, folder: RunFolder, model: Path | None, say: Say
) -> None:
    """Have it end; it is killed when its time is over. `say` is told how far it is. Arguments as for `trainer_within`."""
    within_s = trainer_within(least_s, folder, model)
    await telling(managed.stop(within_s), lambda passed: say(in_words(passed, within_s, folder, model)))


def trainer_within(least_s: float, folder: RunFolder, model: Path | None) -> float:
    """Seconds from SIGTERM on. `least_s`: `trainer.stop_timeout_s`; `model`: the folder of the first policy, None where it
    is a tiny one."""
    return stopped_within(least_s, _longest_step_s(folder.metrics), checkpoint_bytes(folder.checkpoints, model))


def checkpoint_bytes(checkpoints: Path, model: Path | None) -> int:
    """Of the largest checkpoint that is there; before the first one, what the model comes to."""
    largest = max((_bytes_of(each) for each in checkpoints.glob("step-*")), default=0)
    if largest or model is None:
        return largest
    return _GROWS * weight_file_bytes(model)


def in_words(passed_s: float, within_s: float, folder: RunFolder, model: Path | None) -> str:
    """What the supervisor says of a trainer that is still there after `passed_s`."""
    checkpoints = folder.checkpoints
    begun = sum(_bytes_of(each) for pattern in _BEGUN for each in checkpoints.glob(pattern))
    written = ""
    if begun:
        whole = max(begun, checkpoint_bytes(checkpoints, model))
        written = f" ({begun / _GB:.1f} of about {whole / _GB:.1f} GB are written)"
    return (
        f"the trainer ends its step and writes a checkpoint{written}: {passed_s:.0f} s so far, it has {within_s:.0f} s; "
        "trainer.stop_timeout_s gives it longer, a second Ctrl-C ends it at once"
    )


def _longest_step_s(metrics: Path) -> float:
    """Of the last steps, without their wait for a batch, which a trainer that is told to end gives up."""
    lines = [decode_step_metrics(line) for line in LineTail(metrics).new_lines()[-_STEPS:]]
    return (
        max((line.pack_ms + line.train_ms + line.publish_ms for line in lines if line is not None), default=0.0) / 1e3
    )


def _bytes_of(folder: Path) -> int:
    """0 for a folder that goes away meanwhile: its writer renames it when it is whole."""
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except FileNotFoundError:
        return 0
