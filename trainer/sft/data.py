"""Reading the demonstrations folder (`services.wire.tasks.demonstrations`). No torch: a cached warm start needs none."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from services.wire.errors import UsageError
from services.wire.tasks.demonstrations import RECIPE, Demonstration, Question, Recipe

_Line = TypeVar("_Line", Demonstration, Question)
_POLL_S = 0.02


def is_written(folder: Path) -> bool:
    """Whether the folder is complete: the recipe is written last, and appears whole."""
    return (folder / RECIPE).exists()


def wait_until_written(folder: Path, within_s: float) -> None:
    """Blocks until another process has written `folder`, or for `within_s` seconds."""
    ends = time.monotonic() + within_s
    while not is_written(folder) and time.monotonic() < ends:
        time.sleep(_POLL_S)


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


def read_checks(path: Path) -> list[Question]:
    """Raises UsageError for a file that cannot be read. It may be empty, where a task has no one right answer."""
    return _read_lines(path, msgspec.json.Decoder(Question), may_be_empty=True)


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
