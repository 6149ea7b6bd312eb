"""Sums for a language model: the right number, and nothing beside it.

    prompt    What is 3 + 8? Reply with the number only.
    answer    3 + 8 = 11        reward 0.5: the last number is right
              11                reward 1, and success: it is the whole answer

A model that adds well and chats learns to follow the format. Without the half reward for the number alone every reward of
a fresh chat model would be 0, and nothing would be learned.

Held out: pairs of numbers. Each belongs to one split for good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clients.environments.base import Answer, Ended, Problem, Split, problem_rng, split_of
from services.wire.errors import UsageError


class Sums:
    """`largest`: of both numbers; the smallest is 1."""

    name = "sums"

    def __init__(self, largest: int = 9) -> None:
        if largest < 3:
            raise UsageError(f"largest={largest} leaves no pair for each split", "write 3 or more")
        self.largest = largest

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        numbers = problem_rng(self.name, split, index, seed)
        while True:
            first, second = numbers.randint(1, self.largest), numbers.randint(1, self.largest)
            if split_of(f"{first}+{second}") == split:
                prompt = f"What is {first} + {second}? Reply with the number only."
                return Problem(split=split, index=index, prompt=prompt, solution=str(first + second))

    def start(self, problem: Problem) -> SumEpisode:
        return SumEpisode(problem)


@dataclass(frozen=True)
class SumEpisode:
    problem: Problem

    @property
    def first_turn(self) -> str:
        return self.problem.prompt

    def respond(self, answer: Answer) -> Ended:
        text = answer.text.strip()
        numbers = re.findall(r"\d+", text)
        right = bool(numbers) and numbers[-1] == self.problem.solution
        exact = answer.complete and text == self.problem.solution
        reward = 0.5 * right + 0.5 * exact
        return Ended(reward, success=exact, components={"right": float(right), "exact": float(exact)})
