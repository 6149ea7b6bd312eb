"""The processes of the benchmark: a publisher and an engine under test, both started by command."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from services.bench.piped import Piped, running_piped
from services.bench.processes import PYTHON, running
from services.first_failure import first_failure
from services.wire.errors import RollmeshError

RUN_ID = "bench-weights"
_POLICY_MODULE = "rollout_server.bench.policy"
_ENGINE_MODULE = "rollout_server.bench.updated_engine"
_PUBLISHER_MODULE = "weight_bus.bench.publisher_process"
_START_WITHIN_S = 300.0
_POLICY_WITHIN_S = 120.0
PROMPT_TOKENS = 48
_VOCABULARY = 256


def prompts(streams: int, seed: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """One prompt of random tokens for each stream: the same for every arm."""
    rng = random.Random(seed)
    return [[rng.randrange(_VOCABULARY) for _ in range(tokens)] for _ in range(streams)]


async def save_policy(folder: Path, scratch: Path, *, hidden_size: int, layers: int, seed: int) -> int:
    """Write a random policy with a tied output head; returns the bytes of its weights. Raises RollmeshError."""
    command = [*PYTHON, _POLICY_MODULE, str(folder), str(hidden_size), str(layers), str(seed)]
    async with running("random policy", command, scratch) as child:
        weights = folder / "model.safetensors"

        async def ended() -> bool:
            return child.process.returncode == 0

        await child.until(ended, _POLICY_WITHIN_S)
    if not weights.exists():
        raise RollmeshError(f"no weights in {folder}", child.tail())
    return weights.stat().st_size


@asynccontextmanager
async def running_engine(
    engine: str, model: Path, scratch: Path, streams: int, name: str = "engine"
) -> AsyncIterator[Piped]:
    """An engine that serves the folder as version 0, with memory for so many streams."""
    command = [*PYTHON, _ENGINE_MODULE, engine, str(model), RUN_ID, str(streams)]
    async with running_piped(f"{engine} {name}", command, scratch, start_within_s=_START_WITHIN_S) as piped:
        yield piped


@asynccontextmanager
async def running_publisher(model: Path, scratch: Path) -> AsyncIterator[Piped]:
    """A publisher that holds the folder's weights."""
    command = [*PYTHON, _PUBLISHER_MODULE, str(model), RUN_ID]
    async with running_piped("publisher", command, scratch, start_within_s=_START_WITHIN_S) as piped:
        yield piped


@asynccontextmanager
async def running_both(engine: str, model: Path, scratch: Path, streams: int) -> AsyncIterator[tuple[Piped, Piped]]:
    """A publisher and an engine, started at the same time: most of a start is imports."""
    async with AsyncExitStack() as stack:
        with first_failure():
            async with asyncio.TaskGroup() as starting:
                publisher = starting.create_task(stack.enter_async_context(running_publisher(model, scratch)))
                under_test = starting.create_task(
                    stack.enter_async_context(running_engine(engine, model, scratch, streams))
                )
        yield publisher.result(), under_test.result()


@asynccontextmanager
async def no_spare_core(scratch: Path) -> AsyncIterator[None]:
    """All cores but one are busy with something else for the time of the block."""
    async with AsyncExitStack() as stack:
        for number in range((os.cpu_count() or 1) - 1):
            busy = [sys.executable, "-c", "while True: pass"]
            await stack.enter_async_context(running(f"neighbour {number}", busy, scratch))
        yield
