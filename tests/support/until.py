"""Waiting, in a test, for what a service does in its own time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count


async def until(condition: Callable[[], bool | Awaitable[bool]], deadline_s: float = 5.0) -> None:
    """Wait for something to become true that a server does in its own time."""
    async with asyncio.timeout(deadline_s):
        for _ in count():
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.002)
