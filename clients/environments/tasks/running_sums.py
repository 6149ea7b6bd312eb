"""Running sums: a task on which a policy learns to write intermediate steps before its answer.

    prompt        31402214=            eight digits 0 … 4
    direct        2$                   the sum modulo 5 at once: hard for a small model
    with thought  <34330014>4$         running sums modulo 5 first, then the last of them: easy

The reward is 1 when the digit at the end is right, whether or not a well-formed scratchpad stands before it, so nothing
but success tells the policy to think.

Held out: digit strings. Each of the 5^8 strings belongs to one split for good (by a hash of the string), so no held-out
prompt is ever trained on, under any seed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clients.environments.base import Answer, Ended, NextTurn, Problem, Split, problem_rng, split_of

DIGITS = 8
BASE = 5


def running_sums(digits: str) -> str:
    """`s1 … s8`: the sum modulo 5 of the first, the first two, … digits."""
    total, sums = 0, []
    for digit in digits:
        total = (total + int(digit)) % BASE
        sums.append(str(total))
    return "".join(sums)


def right_answer(solution: str) -> str:
    """The regular expression that all of an answer must match to be right."""
    return rf"(?:<[0-4]+>)?{solution}"


class RunningSums:
    name = "running-sums"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        numbers = problem_rng(self.name, split, index, seed)
        while True:
            digits = "".join(str(numbers.randrange(BASE)) for _ in range(DIGITS))
            if split_of(digits) == split:
                return Problem(split=split, index=index, prompt=f"{digits}=", solution=running_sums(digits)[-1])

    def start(self, problem: Problem) -> RunningSumsEpisode:
        return RunningSumsEpisode(problem)


@dataclass(frozen=True)
class RunningSumsEpisode:
    problem: Problem

    @property
    def first_turn(self) -> str:
        return self.problem.prompt

    def respond(self, answer: Answer) -> NextTurn | Ended:
        success = answer.complete and re.fullmatch(right_answer(self.problem.solution), answer.text) is not None
        return Ended(reward=float(success), success=success)
