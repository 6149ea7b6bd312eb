"""Demonstrations for a supervised warm start: a tiny model learns the format and some skill, for RL to improve.

The folder's format is `services.wire.tasks.demonstrations`; `problems.jsonl` and `held_out.jsonl` come on request: problems
in the order a run plays them, for other trainers and for benchmarks.

Only the parts marked as trained are in the loss. Demonstrations are sampled from the train split alone. The recipes are
found by experiment: `stop_at_accuracy` is what makes the first phase of running-sums dependable over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from clients.environments.base import Split, problem_rng
from clients.environments.registry import make_environment
from clients.environments.tasks.guess_number import HIGHEST, LOWEST, TURNS, GuessNumber, compare
from clients.environments.tasks.running_sums import RunningSums, right_answer, running_sums
from services.wire.errors import UsageError
from services.wire.tasks.demonstrations import RECIPE, Demonstration, Phase, Question, Recipe

END = "$"
BATCH = 64
CHECKS = 256

Parts = list[tuple[str, bool]]


Demonstrator = Callable[[int, int], Parts]
"""Demonstration number `index` under `seed`."""


def _phase(
    name: str, *, steps: int, learning_rate: float, warmup_steps: int = 20, stop_at_accuracy: float | None = None
) -> Phase:
    return Phase(
        name=name,
        file=f"{name}.jsonl",
        steps=steps,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        batch=BATCH,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        stop_at_accuracy=stop_at_accuracy,
        check_every=25,
    )


SUMS_THINK = _phase("think", steps=300, learning_rate=3e-3, stop_at_accuracy=0.9)
SUMS_MIX = _phase("mix", steps=60, learning_rate=1e-3)
GUESS_MIX = _phase("mix", steps=200, learning_rate=3e-3)


def demonstrate_sum(index: int, seed: int, *, thinking: bool) -> Parts:
    """`d1…d8=` and its answer, with the scratchpad or without."""
    problem = RunningSums().problem("train", index, seed)
    scratchpad = f"<{running_sums(problem.prompt[:-1])}>" if thinking else ""
    return [(problem.prompt, False), (f"{scratchpad}{problem.solution}{END}", True)]


def demonstrate_game(index: int, seed: int, *, bisecting: bool) -> Parts:
    """A whole game, by bisection or by scanning upwards from 1; the replies are not trained on."""
    problem = GuessNumber().problem("train", index, seed)
    hidden, low, high = int(problem.solution), LOWEST, HIGHEST
    parts: Parts = [(problem.prompt, False)]
    for turn in range(TURNS):
        guess = (low + high) // 2 if bisecting else LOWEST + turn
        parts.append((f"{guess}{END}", True))
        reply = compare(hidden, guess)
        if reply == "C":
            break
        low, high = (guess + 1, high) if reply == "H" else (low, guess - 1)
        if turn + 1 < TURNS:
            parts.append((reply, False))
    return parts


def _think(index: int, seed: int) -> Parts:
    return demonstrate_sum(index, seed, thinking=True)


def _mostly_direct(index: int, seed: int) -> Parts:
    return demonstrate_sum(index, seed, thinking=problem_rng("sums-mix", "train", index, seed).random() < 0.1)


def _mostly_scanning(index: int, seed: int) -> Parts:
    return demonstrate_game(index, seed, bisecting=problem_rng("guess-mix", "train", index, seed).random() < 0.2)


_RECIPES: dict[str, list[tuple[Phase, Demonstrator]]] = {
    RunningSums.name: [(SUMS_THINK, _think), (SUMS_MIX, _mostly_direct)],
    GuessNumber.name: [(GUESS_MIX, _mostly_scanning)],
}


def write_demonstrations(task: str, seed: int, folder: Path, *, problems: int = 0, held_out: int = 0) -> None:
    """Write recipe, phases and checks into `folder`, and the first `problems` and `held_out` ones of the two splits.

    The recipe is written last, and appears whole.

    Raises UsageError for an unknown task, a folder that cannot be written, or problems of a task without one right answer.
    """
    make_environment(task)
    if task not in _RECIPES:
        raise UsageError(f"{task} has no demonstrations", f"those of {', '.join(_RECIPES)} can be written")
    if (problems or held_out) and task != RunningSums.name:
        raise UsageError(f"{task} has no one right answer that could be written down", "leave the problems out")
    recipe = _RECIPES[task]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        first = 0
        for phase, demonstrate in recipe:
            numbers = range(first, first + phase.steps * phase.batch)
            _write_lines(folder / phase.file, (Demonstration(demonstrate(index, seed)) for index in numbers))
            first = numbers.stop
        _write_lines(folder / "check.jsonl", _questions(task, range(first, first + CHECKS), seed))
        if problems:
            _write_lines(folder / "problems.jsonl", _problems("train", problems, seed))
        if held_out:
            _write_lines(folder / "held_out.jsonl", _problems("held_out", held_out, seed))
        described = Recipe(task=task, seed=seed, phases=[phase for phase, _ in recipe], check="check.jsonl")
        # In one go: whoever waits for the folder takes its recipe for the end.
        written = folder / f"{RECIPE}.new"
        written.write_bytes(msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n")
        written.replace(folder / RECIPE)
    except OSError as error:
        raise UsageError(
            f"cannot write demonstrations to {folder} ({error.strerror})", "choose another --out"
        ) from error


def _questions(task: str, numbers: range, seed: int) -> Iterator[Question]:
    """Train problems with their answers, of those that no phase demonstrates.

    A game has no one right answer to its opening, so none are written for one.
    """
    if task != RunningSums.name:
        return
    environment = RunningSums()
    for index in numbers:
        problem = environment.problem("train", index, seed)
        yield Question(problem.prompt, problem.solution)


def _problems(split: Split, count: int, seed: int) -> Iterator[Question]:
    environment = RunningSums()
    for index in range(count):
        problem = environment.problem(split, index, seed)
        yield Question(problem.prompt, problem.solution, right_answer(problem.solution))


def _write_lines(path: Path, lines: Iterable[msgspec.Struct]) -> None:
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
