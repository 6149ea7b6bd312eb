"""How a part of rollmesh that is not installed is got, for the remedies of errors."""

from __future__ import annotations


def install(extra: str) -> str:
    """The commands that install an extra of `pyproject.toml`. rollmesh is on no package index: a checkout has it."""
    return f"./dev install '.[{extra}]' in a checkout (in an environment of your own: pip install '.[{extra}]')"
