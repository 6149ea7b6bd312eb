"""Recipes: complete configurations by name, each with a page beside it, in the sources or in the wheel."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from services.wire.errors import UsageError

_FOLDERS = (Path(__file__).parents[2] / "recipes", Path(__file__).parent / "recipes_folder")


def recipes() -> dict[str, Path]:
    """Every recipe's file, by name."""
    return {file.stem: file for folder in reversed(_FOLDERS) for file in sorted(folder.glob("*.toml"))}


def find_recipe(name: str) -> Path:
    """Raises UsageError for a name that no recipe has."""
    known = recipes()
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"no recipe {name!r}", f"{hint}known: {', '.join(sorted(known))}")
