"""An environment of one turn: which of two numbers is larger?

$ rollmesh up --recipe smollm2 --task "python:docs/examples/larger.py:Larger?dialect=chat"
"""

import re

from clients.environments.base import Answer, Ended, Problem, Split, problem_rng, split_of


class Larger:
    name = "larger"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        rng = problem_rng(self.name, split, index, seed)
        while True:
            first, second = rng.sample(range(10, 100), 2)
            if split_of(f"{first},{second}") == split:  # each pair belongs to one split for good
                prompt = f"Which number is larger, {first} or {second}? Reply with the number only."
                return Problem(split, index, prompt=prompt, solution=str(max(first, second)))

    def start(self, problem: Problem) -> "Asked":
        return Asked(problem)


class Asked:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.first_turn = problem, problem.prompt

    def respond(self, answer: Answer) -> Ended:
        numbers = re.findall(r"\d+", answer.text)
        right = numbers[-1:] == [self.problem.solution]
        # Half of the reward for the right number, half for coming to an end with it: so answers of one group differ.
        ended = right and answer.complete
        return Ended(reward=0.5 * right + 0.5 * ended, success=right, components={"numbers": float(len(numbers))})
