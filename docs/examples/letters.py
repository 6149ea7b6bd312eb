"""An environment of one's own in twenty lines: spell a word backwards, with a second chance.

$ rollmesh up --task python:docs/examples/letters.py:Letters?longest=5 model.path=FOLDER
"""

from clients.environments.base import Answer, Ended, NextTurn, Problem, Split, problem_rng, split_of


class Letters:
    name = "letters"

    def __init__(self, longest: int = 4) -> None:
        self.longest = longest

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        rng = problem_rng(self.name, split, index, seed)
        while True:
            word = "".join(rng.choices("abcdefgh", k=rng.randint(2, self.longest)))
            if split_of(word) == split:  # each word belongs to one split for good
                return Problem(split, index, prompt=f"{word}=", solution=word[::-1])

    def start(self, problem: Problem) -> "Spelling":
        return Spelling(problem)


class Spelling:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.first_turn, self.tries = problem, problem.prompt, 0

    def respond(self, answer: Answer) -> NextTurn | Ended:
        self.tries += 1
        right = answer.complete and answer.text.strip() == self.problem.solution
        if right or self.tries == 2:
            return Ended(reward=right / self.tries, success=right)
        return NextTurn("again:")
