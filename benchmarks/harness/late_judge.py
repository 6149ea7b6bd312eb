"""Guess the number, judged after a while: its sessions stay open, with all that was answered in them.

For benchmarks of kills, as `python:benchmarks.harness.late_judge:JudgedLate`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from clients.environments.base import Answer, Ended, Judging, NextTurn, Problem, Split, problem_rng
from clients.environments.tasks.guess_number import GuessNumber, GuessNumberEpisode

LATEST_S = 1.5


class JudgedLate:
    """Each problem takes its own time, up to `LATEST_S` seconds, to be judged."""

    name = "guess-number"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return GuessNumber().problem(split, index, seed)

    def start(self, problem: Problem) -> JudgedLateEpisode:
        return JudgedLateEpisode(GuessNumberEpisode(problem))


@dataclass(frozen=True)
class JudgedLateEpisode:
    game: GuessNumberEpisode

    @property
    def first_turn(self) -> str:
        return self.game.first_turn

    def respond(self, answer: Answer) -> NextTurn | Judging:
        said = self.game.respond(answer)
        if isinstance(said, NextTurn):
            return said
        problem, ended = self.game.problem, said
        late_s = problem_rng("late", problem.split, problem.index, 0).uniform(0.0, LATEST_S)

        async def judge() -> Ended:
            if problem.split == "train":
                await asyncio.sleep(late_s)
            return ended

        return Judging(judge)
