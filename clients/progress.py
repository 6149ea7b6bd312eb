"""What an environment runner has played, said every few seconds, also while nothing comes to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from clients.losses import Losses
from clients.play import Played

_log = structlog.get_logger()
PROGRESS_EVERY_S = 5.0


class Progress:
    """Counts since the last line; `run` says it, until cancelled."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self._episodes = self._successes = self._groups = 0
        self._reward = 0.0
        self.in_play = 0
        """Groups that are open right now."""

    def count(self, played: Sequence[Played]) -> None:
        """A group came to its end."""
        self._losses.played()
        self._groups += 1
        self._episodes += len(played)
        self._successes += sum(episode.ended.success for episode in played)
        self._reward += sum(episode.ended.reward for episode in played)

    async def run(self) -> None:
        said_at = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            now = time.monotonic()
            self._say(now - said_at)
            said_at = now

    def _say(self, seconds: float) -> None:
        lost = dict(self._losses.by_cause)
        more = {"lost": lost, "retried": self._losses.retried, "given_up": self._losses.given_up} if lost else {}
        if self._groups:
            success, reward = round(self._successes / self._episodes, 3), round(self._reward / self._episodes, 3)
            _log.info(
                "groups played",
                groups=self._groups,
                success=success,
                reward=reward,
                in_play=self.in_play,
                seconds=round(seconds, 1),
                **more,
            )
        else:
            _log.info("waiting", waiting_for="episodes to end", in_play=self.in_play, seconds=round(seconds, 1), **more)
        self._episodes = self._successes = self._groups = 0
        self._reward = 0.0
