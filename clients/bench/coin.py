"""A task that nobody can learn: whether an answer succeeds is a coin that its text tosses.

For benchmarks of the mesh's pace, as `python:clients.bench.coin:Coin`: every group has something to compare, whatever the
policy says. Splits differ in their prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from clients.environment import Answer, Ended, NextTurn, Problem, Split


class Coin:
    name = "coin"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return Problem(split=split, index=index, prompt=f"{split} {seed} {index:06d}: ")

    def start(self, problem: Problem) -> CoinEpisode:
        return CoinEpisode(problem)


@dataclass(frozen=True)
class CoinEpisode:
    problem: Problem

    @property
    def first_turn(self) -> str:
        return self.problem.prompt

    def respond(self, answer: Answer) -> NextTurn | Ended:
        success = crc32((self.problem.prompt + answer.text).encode()) % 2 == 0
        return Ended(reward=float(success), success=success)
