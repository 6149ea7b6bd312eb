"""A run's final weights once more, by ranks that know nothing of it but its first weights, its step log and its stream.

    first weights ─► ranks ─► the batches of the step log, read from the stream ─► the bytes of checkpoints/final?

Started as each of the run's ranks (`benchmarks.harness.ranked`). Rank 0 writes what it found. For a run whose stream was
never trimmed, which is so before its second checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from services.config.checks import layout_asked
from services.config.load import load_settings
from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.run_store.client import connect
from services.run_store.stream import StreamEntry, TrajectoryReader
from trainer.checkpoint.checkpoint import gather_policy
from trainer.checkpoint.environment import repeat_exactly
from trainer.checkpoint.log_lines import StepRecord
from trainer.checkpoint.model_folder import load_policy
from trainer.checkpoint.recovery import groups_of, terms_of, under
from trainer.checkpoint.step_log import StepLog
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import follow, train_batch
from trainer.parallel.orders import Gather, Measure, Stop, Train, decode, tell
from trainer.parallel.ranks import joined


class Recomputed(msgspec.Struct, frozen=True):
    """`steps`: repeated ones. `differ`: tensors of the final folder with other bytes, of `tensors`."""

    steps: int
    tensors: int
    differ: list[str]


async def entries_of(url: str, run_id: str, records: Sequence[StepRecord]) -> list[list[StreamEntry]]:
    """What each of these batches consumed, from the stream."""
    redis = connect(url)
    try:
        reader = TrajectoryReader(redis, run_id)
        return [await reader.fetch(record.entries) for record in records]
    finally:
        await redis.aclose()


def repeated(
    roles: Roles,
    settings: RunSettings,
    log: StepLog,
    records: Sequence[StepRecord],
    batches: Sequence[Sequence[StreamEntry]],
) -> Iterator[None]:
    """Make the steps of `records` again, under the settings that were in force; stops after each batch."""
    for record, entries in zip(records, batches, strict=True):
        outcome = log.outcomes[record.version]
        in_force = under(settings, log.tunables_at(record.version), outcome.micro_batch_tokens)
        train_batch(roles, in_force, groups_of(record, entries), record.updates, outcome.made)
        yield


def recompute(folder: RunFolder, redis_url: str, ranks: int) -> Recomputed | None:
    """For each rank; None but on rank 0."""
    settings = load_settings(folder.config, []).with_threads(1, tiny=True)
    torch.set_num_threads(settings.trainer.thread_count)
    repeat_exactly()
    run_id = folder.run_id.read_text().strip()
    with joined(layout_asked(settings.trainer.parallel, ranks)) as own:
        roles = make_roles(lambda: load_policy(folder.model), settings, 0, ranks=own)
        if not own.leads:
            _follow(roles)
            return None
        with closing(StepLog(folder.checkpoints / "steps.jsonl", run_id, terms_of(settings))) as log:
            batches = asyncio.run(entries_of(redis_url, run_id, log.records))
            for _ in repeated(roles, settings, log, log.records, batches):
                pass
            steps = len(log.records)
        made = gather_policy(roles)
        tell(own, Stop())
    found = dict(load_policy(folder.checkpoints / "final").named_parameters())
    weights = dict(roles.learner.model.named_parameters()) if made is None else made.weights
    differ = [name for name, weight in found.items() if not torch.equal(weights[name], weight)]
    return Recomputed(steps, len(found), differ)


def _follow(roles: Roles) -> None:
    while not isinstance(order := decode(roles.ranks.receive()), Stop):
        match order:
            case Train() | Measure():
                follow(roles, order)
            case Gather():
                gather_policy(roles)


if __name__ == "__main__":
    told = recompute(RunFolder(Path(sys.argv[1])), sys.argv[2], int(os.environ["WORLD_SIZE"]))
    if told is not None:
        Path(sys.argv[3]).write_bytes(msgspec.json.encode(told))
