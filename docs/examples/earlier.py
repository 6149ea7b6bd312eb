"""Two letters: which comes first in the alphabet? As a script it prints rows that teach the form of an answer, and no more.

$ python docs/examples/earlier.py 3000 > form.jsonl
$ rollmesh sft --model models/tiny --data form.jsonl --out models/form
$ rollmesh up --task python:docs/examples/earlier.py:Earlier model.path=models/form --steps 250
"""

import json
import random
import sys

from clients.environments.base import Answer, Ended, Problem, Split, problem_rng, split_of


class Earlier:
    name = "earlier"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        rng = problem_rng(self.name, split, index, seed)
        while True:
            letters = rng.sample("abcdefghijklmnopqrstuvwxyz", 2)
            if split_of(" ".join(letters)) == split:
                return Problem(split, index, prompt=" ".join(letters), solution=min(letters))

    def start(self, problem: Problem) -> "Asked":
        return Asked(problem)


class Asked:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.first_turn = problem, problem.prompt

    def respond(self, answer: Answer) -> Ended:
        said = answer.text.strip()
        right = said == self.problem.solution
        return Ended(reward=0.8 * right + 0.2 * (said in self.problem.prompt.split()), success=right)


if __name__ == "__main__":
    source, task = random.Random(1), Earlier()
    for number in range(int(sys.argv[1])):
        prompt = task.problem("train", number, seed=0).prompt
        sys.stdout.write(json.dumps({"prompt": prompt, "answer": source.choice(prompt.split())}) + "\n")
