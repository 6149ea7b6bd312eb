"""Trains runs of the staleness table one after the other, on one core.

benchmark ──TrainStale──► this process        python -m trainer.bench.staleness.worker
          ◄───Outcome───
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from services.bench.piped import answer_lines, replies_only
from services.imports import heavy_imports
from trainer.bench.staleness.results import Outcome, StaleRun


class TrainStale(msgspec.Struct, frozen=True, tag=True):
    """Train `run` from a folder that `trainer.bench.staleness.warm_starts` made."""

    run: StaleRun
    folder: str
    versions: dict[str, str]


def main() -> None:
    replies = replies_only()
    with heavy_imports():
        import torch

        from trainer.bench.staleness.stale_training import train_stale

    torch.set_num_threads(1)

    async def handle(command: TrainStale) -> Outcome:
        return await asyncio.to_thread(train_stale, command.run, Path(command.folder), command.versions)

    asyncio.run(answer_lines(replies, TrainStale, handle))


if __name__ == "__main__":
    main()
