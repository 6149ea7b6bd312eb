"""Answering requests a given number at a time, timed from the first sent to the last answered. Any arm is timed by this."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from services.first_failure import first_failure

Item = TypeVar("Item")


class Rate(msgspec.Struct, frozen=True):
    """`tokens` drawn in `seconds`."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


async def in_parallel(items: Sequence[Item], concurrency: int, answer: Callable[[Item], Awaitable[int]]) -> Rate:
    """Keep `concurrency` of the items in flight until all are answered; `answer` returns how many tokens it got.

    Raises the first RollmeshError of an answer.
    """
    waiting = iter(items)
    tokens = 0

    async def work() -> None:
        nonlocal tokens
        for item in waiting:
            drawn = await answer(item)  # awaited before the sum is read: others add to it meanwhile
            tokens += drawn

    started = time.perf_counter()
    with first_failure():
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(items))):
                workers.create_task(work())
    return Rate(tokens, time.perf_counter() - started)
