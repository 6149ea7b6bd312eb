"""Guess the number: a game of up to five turns, whose replies the policy must read but is not trained on.

    environment  kqz:                      the game's opening: three letters that say nothing about the number
    policy       16$   environment  H      the hidden number is higher
    policy       24$   environment  L      … lower
    policy       20$                       found: reward 1, the game ends (`C` is the reply that nobody needs to read)

With 1 … 31 and five turns, bisection always finds the number and scanning upwards finds five in 31.

Held out: openings. Each of the 26^3 openings belongs to one split for good; the hidden number is sampled independently of
the opening. All 31 numbers occur in both splits, for they are the answers and not the questions: what a policy could
memorise here is "this opening hides that number", and held-out games show openings that no training game had. What they
do not test is numbers that were never hidden before; a game with other bounds would, and would be another task.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass

from clients.environments.base import Answer, Ended, NextTurn, Problem, Split, problem_rng, split_of

LOWEST, HIGHEST = 1, 31
TURNS = 5

_GUESS = re.compile(r"[1-9][0-9]?")


def compare(hidden: int, guess: int) -> str:
    """The reply to a guess: H (go higher), L (go lower) or C (correct)."""
    return "C" if guess == hidden else "H" if hidden > guess else "L"


class GuessNumber:
    name = "guess-number"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        numbers = problem_rng(self.name, split, index, seed)
        hidden = numbers.randint(LOWEST, HIGHEST)
        while True:
            opening = "".join(numbers.choices(string.ascii_lowercase, k=3))
            if split_of(opening) == split:
                return Problem(split=split, index=index, prompt=f"{opening}:", solution=str(hidden))

    def start(self, problem: Problem) -> GuessNumberEpisode:
        return GuessNumberEpisode(problem)


@dataclass
class GuessNumberEpisode:
    problem: Problem
    turns_taken: int = 0

    @property
    def first_turn(self) -> str:
        return self.problem.prompt

    def respond(self, answer: Answer) -> NextTurn | Ended:
        self.turns_taken += 1
        guess = int(answer.text) if answer.complete and _GUESS.fullmatch(answer.text) else None
        if guess is None or not LOWEST <= guess <= HIGHEST:
            return Ended(reward=0.0, success=False)
        reply = compare(int(self.problem.solution), guess)
        if reply == "C":
            return Ended(reward=1.0, success=True)
        if self.turns_taken == TURNS:
            return Ended(reward=0.0, success=False)
        return NextTurn(reply)
