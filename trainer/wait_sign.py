"""What the trainer waits for, posted on the wait board from the training thread without waiting for Redis."""

from __future__ import annotations

import asyncio

from services.run_store.status import WaitBoard
from trainer.background import Background


class WaitSign:
    """Posts and clears in the order of the calls, whatever the network does."""

    def __init__(self, board: WaitBoard, background: Background) -> None:
        self._board, self._background = board, background
        self._order = asyncio.Lock()
        self._posted = False

    def post(self, waiting_for: str) -> None:
        self._posted = True
        self._background.spawn(self._apply(waiting_for), "wait board")

    def clear(self) -> None:
        if self._posted:
            self._posted = False
            self._background.spawn(self._apply(None), "wait board")

    async def _apply(self, waiting_for: str | None) -> None:
        async with self._order:
            if waiting_for is None:
                await self._board.clear()
            else:
                await self._board.post(waiting_for)
