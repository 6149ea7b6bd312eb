"""Progress log of the runner: a line every few seconds with the counts since the last one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from clients.runner.failures import GroupFailures
from clients.runner.text_episodes import Played

PROGRESS_EVERY_S = 5.0

_log = structlog.get_logger()


@dataclass
class _Tally:
    groups: int = 0
    episodes: int = 0
    successes: int = 0
    reward: float = 0.0

    def add(self, played: Sequence[Played]) -> None:
        self.groups += 1
        self.episodes += len(played)
        self.successes += sum(episode.ended.success for episode in played)
        self.reward += sum(episode.ended.reward for episode in played)

    @property
    def success(self) -> float:
        return round(self.successes / self.episodes, 3)


class Progress:
    """`run` logs until cancelled."""

    def __init__(self, failures: GroupFailures) -> None:
        self._failures = failures
        self._by_task: dict[str, _Tally] = {}
        self.in_play = 0
        """Groups that are open right now."""

    def count(self, task: str, played: Sequence[Played]) -> None:
        """A group of the task came to its end."""
        self._failures.played()
        self._by_task.setdefault(task, _Tally()).add(played)

    async def run(self) -> None:
        said_at = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            now = time.monotonic()
            self._say(now - said_at)
            said_at = now

    def _say(self, seconds: float) -> None:
        lost = dict(self._failures.by_cause)
        more: dict[str, object] = {}
        if lost:
            more |= {"lost": lost, "retried": self._failures.retried, "given_up": self._failures.given_up}
        if len(self._by_task) > 1:
            more["by_task"] = {name: tally.success for name, tally in sorted(self._by_task.items())}
        tallies = self._by_task.values()
        if tallies:
            episodes = sum(tally.episodes for tally in tallies)
            _log.info(
                "groups played",
                groups=sum(tally.groups for tally in tallies),
                success=round(sum(tally.successes for tally in tallies) / episodes, 3),
                reward=round(sum(tally.reward for tally in tallies) / episodes, 3),
                in_play=self.in_play,
                seconds=round(seconds, 1),
                **more,
            )
        else:
            _log.info("waiting", waiting_for="episodes to end", in_play=self.in_play, seconds=round(seconds, 1), **more)
        self._by_task = {}
