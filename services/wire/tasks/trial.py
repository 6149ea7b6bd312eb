"""What a trial of a task found: `rollmesh run-environment --trial` prints it, `rollmesh doctor` reads it.

`--check --json` prints it without what problems and episodes say; `rollmesh up` reads that.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class TaskTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One task, tried without a policy. Times: seconds of the slowest call."""

    task: str
    speaks: Literal["text", "chat", "agent"]
    """How it speaks to the policy; `agent`: an agent calls it, and no episode was played here."""
    assumed: bool = False
    """It speaks plain text, and its name does not say so (`?dialect=`)."""
    problems: int = 0
    """Training problems that were posed."""
    held_out: int = 0
    """Held-out ones."""
    shared: int = 0
    """Of these, how many are among the training ones."""
    different: int = 0
    """Of the held-out ones, how many there are if those that ask the same are counted once; 0: texts do not tell
    them apart, nor those of training."""
    characters: str = ""
    """Of the prompts of the training problems, once each, in their order; none unless the task speaks plain text."""
    changed: str | None = None
    """What was different when it was asked for again; None where nothing was."""
    rewards: list[float] = []
    """Of answers that were given; empty where episodes cannot be judged here."""
    unplayed: str | None = None
    """Why no episode was played; None where some were."""
    right_answers: int = 0
    """How many of these were right."""
    problem_s: float = 0.0
    respond_s: float = 0.0
    failed: str | None = None
    """What its code raised; None where it did not."""
