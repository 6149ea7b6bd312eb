"""Sums for a language model that chats.

    prompt    What is 3 + 8? Reply with the number only.
    answer    3 + 8 = 11        reward 1: the last number is right
              This is easy.     reward 0

`exact` among the components says whether the answer was that number and nothing beside it; it is not rewarded.

Held out: pairs of numbers. Each belongs to one split for good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clients.environments.base import Answer, Ended, Problem, Split, problem_rng, split_of

LARGEST = 9


class Sums:
    name = "sums"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        numbers = problem_rng(self.name, split, index, seed)
        while True:
            first, second = numbers.randint(1, LARGEST), numbers.randint(1, LARGEST)
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
        numbers = re.findall(r"\d+", answer.text)
        right = bool(numbers) and numbers[-1] == self.problem.solution
        exact = answer.text.strip() == self.problem.solution
        return Ended(float(right), success=right, components={"exact": float(exact)})
