"""The demonstrations folder as the warm start reads it. No torch here: a cached warm start needs none.

recipe.json ── phases ──► <phase>.jsonl   {"parts": [["text", trained], …]}     a demonstration a line
            └─ check ───► check.jsonl     {"prompt", "answer"}                  a sampled answer must end in `answer`
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from services.wire.errors import UsageError

RECIPE = "recipe.json"


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One supervised phase with a fresh AdamW: `steps` steps of `batch` demonstrations, in the file's order.

    With `stop_at_accuracy` the sampled accuracy is measured every `check_every` steps; once it is reached, the phase ends.
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
    task: str
    seed: int
    phases: list[Phase]
    check: str


class Demonstration(msgspec.Struct, frozen=True):
    """Pieces of text in order; only those marked True are in the loss."""

    parts: list[tuple[str, bool]]


class Check(msgspec.Struct, frozen=True):
    prompt: str
    answer: str


_Line = TypeVar("_Line", Demonstration, Check)


def read_recipe(folder: Path) -> Recipe:
    """Raises UsageError when the folder holds no recipe, or one that cannot be followed."""
    path = folder / RECIPE
    try:
        recipe = msgspec.json.decode(path.read_bytes(), type=Recipe)
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror})", "make the folder with `rollmesh demonstrations`"
        ) from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no recipe ({error})", "write it anew with `rollmesh demonstrations`") from error
    for phase in recipe.phases:
        if min(phase.steps, phase.batch, phase.check_every) < 1:
            raise UsageError(f"{path}: phase {phase.name} has steps, batch or check_every below 1", "mend the recipe")
    return recipe


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Raises UsageError for a file that cannot be read or holds no demonstration."""
    return _read_lines(path, msgspec.json.Decoder(Demonstration))


def read_checks(path: Path) -> list[Check]:
    """Raises UsageError for a file that cannot be read. It may be empty, where a task has no one right answer."""
    return _read_lines(path, msgspec.json.Decoder(Check), may_be_empty=True)


def folder_digest(folder: Path, recipe: Recipe) -> str:
    """blake2b, hexadecimal, over names and bytes of everything the recipe names."""
    digest = hashlib.blake2b(digest_size=16)
    for name in [RECIPE, *(phase.file for phase in recipe.phases), recipe.check]:
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise UsageError(
                f"cannot read {folder / name} ({error.strerror})", "write the demonstrations anew"
            ) from error
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _read_lines(path: Path, decoder: msgspec.json.Decoder[_Line], *, may_be_empty: bool = False) -> list[_Line]:
    try:
        lines = decoder.decode_lines(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})", "write the demonstrations anew") from error
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{path} does not hold what a recipe names ({error})", "write the demonstrations anew"
        ) from error
    if not lines and not may_be_empty:
        raise UsageError(f"{path} holds no demonstration", "write the demonstrations anew")
    return lines
