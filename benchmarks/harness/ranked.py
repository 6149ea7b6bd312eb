"""Ranks of a measurement: the same module once a rank, with torchrun's variables and one thread of torch each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.harness.processes import LOOPBACK, PYTHON, free_port, running
from services.wire.errors import RollmeshError


async def run_ranks(ranks: int, module: str, words: Sequence[str], folder: Path, within_s: float) -> None:
    """Run `python -m module words…` on so many ranks, logs in `folder`, to their end.

    Raises RollmeshError where one fails, and TimeoutError where they take longer than `within_s`.
    """
    shared = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                running(
                    f"rank {rank}",
                    (*PYTHON, module, *words),
                    folder,
                    environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(ranks)
        ]
        async with asyncio.timeout(within_s):
            codes = await asyncio.gather(*(child.process.wait() for child in processes))
        if any(codes):
            said = "\n".join(child.tail() for child in processes)
            raise RollmeshError(f"{module} on {ranks} ranks ended with exit codes {codes}", said)
