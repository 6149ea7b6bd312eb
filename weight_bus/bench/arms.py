"""The ways of updating an engine that decodes, each one round of an arm: an episode of streams and updates.

begin streams ─ quiet ─ update ─ quiet ─ update ─ … ─ quiet ─ end        `Ways.episode`

nixl, shm    publish ─► stage, while tokens are drawn ─► commit between two steps
file         save ─► pause · copy from the file over the live tensors · resume
prefetch     save ─► read into the engine's memory ─► pause · copy over the live tensors · resume
gloo         pause · receive a broadcast into the live tensors · resume
nothing      a moment at which nothing happens: how far the figures move by themselves
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

from services.bench.piped import Piped
from services.bench.processes import free_port
from weight_bus.bench.gaps import Episode, Update
from weight_bus.bench.messages import (
    PAUSED_WAYS,
    Arrivals,
    Begin,
    Broadcast,
    Change,
    Commit,
    Done,
    End,
    Join,
    PausedWay,
    Prefetch,
    Publish,
    Published,
    Reload,
    Save,
    Span,
    Stage,
)

NOTHING = "nothing"
_NOTHING_S = 0.3


class Ways:
    """One engine and one publisher, and every way from the one to the other. `folder`: for the file that is saved."""

    def __init__(self, engine: Piped, publisher: Piped, folder: Path, transports: list[str]) -> None:
        self._engine = engine
        self._publisher = publisher
        self._file = str(folder / "update.safetensors")
        self._versions = count(1)
        self._updates: dict[str, Callable[[], Awaitable[Update]]] = {name: self._ours(name) for name in transports}
        self._updates |= {way: self._paused(way) for way in PAUSED_WAYS}
        self._updates[NOTHING] = _nothing

    @property
    def arms(self) -> list[str]:
        return list(self._updates)

    async def join(self) -> None:
        """Make the gloo group of the two processes."""
        join = Join(free_port())
        await asyncio.gather(self._publisher.ask(join, Done), self._engine.ask(join, Done))

    async def update(self, arm: str) -> Update:
        """Change the weights and bring them into the engine."""
        await self._publisher.ask(Change(), Done)
        return await self._updates[arm]()

    async def episode(self, arm: str, streams: Begin, *, updates: int, quiet_s: float, name: str = "") -> Episode:
        """One round of an arm; `name`: what to call it instead."""
        await self._engine.ask(streams, Done)
        settled = time.monotonic()
        done = []
        for _ in range(updates):
            await asyncio.sleep(quiet_s)
            done.append(await self.update(arm))
        await asyncio.sleep(quiet_s)
        arrivals = await self._engine.ask(End(), Arrivals)
        return Episode(name or arm, settled, arrivals.streams, done)

    async def staged(self, transport: str) -> tuple[int, float, Span]:
        """Publish the weights as they are and stage them: version, when publishing began, when it was staged."""
        version, begin = next(self._versions), time.monotonic()
        published = await self._publisher.ask(Publish(transport, version), Published)
        span = await self._engine.ask(Stage(published.manifest), Span)
        return version, begin, span

    def _ours(self, transport: str) -> Callable[[], Awaitable[Update]]:
        async def update() -> Update:
            version, begin, staging = await self.staged(transport)
            committed = await self._engine.ask(Commit(version), Span)
            # The engine answers right after the flip, before the step that draws the next token has ended.
            return Update(Span(begin, committed.end), Span(committed.end, committed.end), staging)

        return update

    def _paused(self, way: PausedWay) -> Callable[[], Awaitable[Update]]:
        async def update() -> Update:
            begin = time.monotonic()
            if way == "gloo":
                # It waits in its broadcast before the engine pauses.
                sending = asyncio.ensure_future(self._publisher.ask(Broadcast(), Span))
                still = await self._engine.ask(Reload(way), Span)
                await sending
            else:
                await self._publisher.ask(Save(self._file), Span)
                if way == "prefetch":
                    await self._engine.ask(Prefetch(self._file), Span)
                still = await self._engine.ask(Reload(way, self._file), Span)
            return Update(Span(begin, still.end), still)

        return update


async def _nothing() -> Update:
    begin = time.monotonic()
    await asyncio.sleep(_NOTHING_S)
    end = time.monotonic()
    return Update(Span(begin, end), Span(end, end))
