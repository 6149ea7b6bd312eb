"""The demonstrations folder: what `rollmesh demonstrations` writes and `rollmesh sft` reads.

recipe.json ── phases ──► <phase>.jsonl   Demonstration a line
            └─ check ───► check.jsonl     Question a line: a sampled answer must end in `answer`

On request also problems.jsonl and held_out.jsonl, Questions of the train and the held-out split in the order of a run.
"""

from __future__ import annotations

import msgspec

RECIPE = "recipe.json"


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One supervised phase with a fresh AdamW: `steps` steps of `batch` demonstrations, in the order of `file`.

    The learning rate rises linearly over `warmup_steps`. With `stop_at_accuracy` the sampled accuracy is measured every
    `check_every` steps; the phase ends once it is reached, and never reaching it is an error.
    """

    name: str
    file: str
    steps: int
    learning_rate: float
    warmup_steps: int
    batch: int
    betas: tuple[float, float]
    weight_decay: float
    stop_at_accuracy: float | None
    check_every: int


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`check` and each phase's `file` lie beside the recipe, which is written last."""

    task: str
    seed: int
    phases: list[Phase]
    check: str


class Demonstration(msgspec.Struct, frozen=True):
    """Pieces of text in order; only those marked True are in the loss. `$`, the end token, is written out."""

    parts: list[tuple[str, bool]]


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """A problem with one right answer.

    `accepts`: a regular expression that all of what is said must match to be right, as the task itself judges it; empty:
    whatever ends in `answer`.
    """

    prompt: str
    answer: str
    accepts: str = ""
