"""The final weights of a run once more, from its older checkpoint, the step log and the stream: a process of its own.

python -m tests.support.recompute RUN_DIR REDIS_URL ──► the number of steps that were repeated; exit code 1 where the
                                                         bytes are others than those of `checkpoints/final`
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.harness.recomputed import entries_of, repeated
from services.config.load import load_settings
from services.host.run_folder import RunFolder
from trainer.assembly import load_policy
from trainer.checkpoint.checkpoint import path_of, restore_newest, versions
from trainer.checkpoint.environment import repeat_exactly
from trainer.checkpoint.recovery import Replay, terms_of
from trainer.checkpoint.step_log import StepLog
from trainer.model.learner import trained_weights
from trainer.model.roles import make_roles


def recompute(folder: RunFolder, redis_url: str) -> int:
    settings = load_settings(folder.config, []).with_threads(1, tiny=True)
    torch.set_num_threads(settings.trainer.thread_count)
    repeat_exactly()
    run_id = folder.run_id.read_text().strip()
    roles = make_roles(lambda: load_policy(folder.model), settings, 0)
    there = versions(folder.checkpoints)
    with closing(StepLog(folder.checkpoints / "steps.jsonl", run_id, terms_of(settings))) as log:
        for newer in there[1:]:
            path_of(folder.checkpoints, newer).rename(folder.root / f"newer-{newer}")
        restore_newest(folder.checkpoints, roles, run_id)
        records = Replay.since(roles.learner.version, log.records).records
        fetched = asyncio.run(entries_of(redis_url, run_id, records))
        for _ in repeated(roles, settings, log, records, fetched):
            between = folder.root / f"newer-{roles.learner.version}"
            if between.exists():
                same(trained_weights(roles.learner.model), load_file(between / "model.safetensors"), between)
    model = roles.learner.model
    final = load_policy(folder.checkpoints / "final")
    same(dict(model.named_parameters()), dict(final.named_parameters()), folder.checkpoints / "final")
    return len(records)


def same(made: dict[str, torch.Tensor], found: dict[str, torch.Tensor], where: Path) -> None:
    other = [name for name in found if not torch.equal(made[name], found[name])]
    if other:
        sys.exit(f"{where} holds other bytes in {len(other)} of {len(found)} tensors, such as {other[0]}")


if __name__ == "__main__":
    sys.stdout.write(f"{recompute(RunFolder(Path(sys.argv[1])), sys.argv[2])}\n")
