"""Six digits: which is the first? In digits that the tiny model of the built-in task knows.

$ rollmesh up --task python:docs/examples/first.py:First model.path=models/tiny
"""

from clients.environments.base import Answer, Ended, Problem, Split, problem_rng, split_of


class First:
    name = "first"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        rng = problem_rng(self.name, split, index, seed)
        while True:
            digits = "".join(rng.choices("01234", k=6))
            if split_of(digits) == split:
                return Problem(split, index, prompt=f"{digits}=", solution=digits[0])

    def start(self, problem: Problem) -> "Asked":
        return Asked(problem)


class Asked:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.first_turn = problem, problem.prompt

    def respond(self, answer: Answer) -> Ended:
        right = answer.text.strip() == self.problem.solution
        # Half of the reward for a single digit: a form that can be learned before the answer.
        alone = len(answer.text.strip()) == 1 and answer.text.strip().isdigit()
        return Ended(reward=0.5 * right + 0.5 * alone, success=right)
