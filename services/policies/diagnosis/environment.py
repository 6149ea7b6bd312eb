"""Findings of an environment, from a trial of its problems and episodes without a policy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from services.policies.diagnosis.finding import Finding, error, warning
from services.wire.tasks.trial import TaskTrial

SLOW_S = 0.25
"""Of a call on the runner's event loop, in which nobody else's episodes go on. Built-in tasks take microseconds."""
MOST_SHARED = 0.02
"""Share of the held-out problems that may be in training too, by chance: above it held-out success says little."""
FEWEST_DIFFERENT = 0.75
"""Of the held-out problems that were posed, those that ask something else than the others: below, success is known far less
well than so many problems promise."""
LEAST_REWARDS = 8


def of_dialects(tried: Iterable[TaskTrial], *, chat_template: bool) -> Iterator[Finding]:
    """`of_dialect` of each task that it is true of. `chat_template`: whether the model has one."""
    yield from (of_dialect(each.task) for each in tried if each.assumed and chat_template)


def of_dialect(task: str) -> Finding:
    """Of a task that speaks plain text because nothing says otherwise, to a model that has a chat template."""
    return warning(
        "dialect",
        f"the model has a chat template and task {task} speaks plain text",
        "its name has no ?dialect=, and an environment of your own speaks plain text then",
        "add ?dialect=chat, or ?dialect=text if it is meant",
    )


def of_trial(trial: TaskTrial) -> Iterator[Finding]:
    """One task's."""
    task = trial.task
    if trial.failed is not None:
        yield error(
            "environment-fails",
            f"task {task} cannot be played",
            trial.failed,
            "do what its error asks for, or fix its code: `rollmesh run-environment --trial --task …` tries it without a "
            "server",
        )
        return
    if trial.changed is not None:
        yield error(
            "environment-nondeterministic",
            f"task {task} is not a function of its arguments: siblings of a group would play different problems",
            trial.changed,
            "draw random numbers from (split, index, seed) alone: problem_rng(name, split, index, seed); no clock, no "
            "order of sets, no global random",
        )
    yield from _of_rewards(trial)
    slowest, where = max((trial.problem_s, "problem()"), (trial.respond_s, "respond()"))
    if slowest > SLOW_S:
        yield warning(
            "environment-slow",
            f"task {task} is slow, and holds up every other episode meanwhile",
            f"{where} took {slowest:.2f} s, once in {trial.problems} problems or more; {SLOW_S:g} s is much",
            "load what it needs when it is made; put I/O and waiting into an agent environment or a Judging",
        )
    if trial.held_out and trial.shared / trial.held_out > MOST_SHARED:
        yield error(
            "environment-splits-overlap",
            f"task {task} trains on its held-out problems: their success says nothing",
            f"{trial.shared} of {trial.held_out} held-out problems are among the first {trial.problems} of training",
            "decide each problem's split by its text: split_of(key)",
        )
    if 0 < trial.different < FEWEST_DIFFERENT * trial.held_out:
        yield warning(
            "environment-repeats-problems",
            f"task {trial.task} has few held-out problems: success is known less well than their number says",
            f"{trial.different} of the first {trial.held_out} held-out problems differ",
            "draw from more problems (split_of holds one in eight out), or set evaluation.problems to as many as differ",
        )


def _of_rewards(trial: TaskTrial) -> Iterator[Finding]:
    """Nonsense may be worth nothing: only where a right answer was among them, or all are worth something, is it said."""
    rewards = trial.rewards
    if len(rewards) < LEAST_REWARDS or max(rewards) > min(rewards):
        return
    if rewards[0] or trial.right_answers:
        tried = f"{trial.right_answers} of them right" if trial.right_answers else "most of them nonsense"
        yield error(
            "environment-equal-rewards",
            f"task {trial.task} gives every answer the same reward: there is nothing to learn from",
            f"{len(rewards)} answers, {tried}, and each is worth {rewards[0]:g}",
            "have the reward say how good an answer is",
        )
