"""What a logging backend gets of a run, and the interface of each.

metrics.jsonl, rollouts/, evaluations.json ──► Figures, one a step ──► Tracker ──► its files, or its server
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Json = Mapping[str, object]


@dataclass(frozen=True)
class Figures:
    """One optimizer step. `at`: Unix seconds. `values`: by name, parts of a figure behind a slash."""

    step: int
    at: float
    values: dict[str, float]
    samples: str = ""
    """Rollouts of the step, as text."""


@dataclass(frozen=True)
class TrackedRun:
    """What a backend is told of the run. `folder`: for what it keeps on this machine. `settings`: by dotted name."""

    run_id: str
    name: str
    project: str
    folder: Path
    settings: Mapping[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """The records of one run in one backend, opened by its class with a `TrackedRun`. Calls block, and may raise anything
    that the library does."""

    def held(self) -> set[int]:
        """The steps that it holds, of this process or of one before it."""
        ...

    def log(self, figures: Sequence[Figures]) -> None:
        """Add steps that it does not hold, in order."""
        ...

    def finish(self, summary: Mapping[str, float]) -> None:
        """The run has ended well; figures of all of it."""
        ...

    def close(self) -> None:
        """Everything that was logged is kept when this returns."""
        ...


def flattened(tree: Json, prefix: str = "") -> dict[str, float]:
    """Every number of a JSON object, by its path. A text within counts as 1, so that warnings show; lists are left out."""
    return dict(_leaves(tree, prefix))


def _leaves(tree: Json, prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)
        elif isinstance(value, str) and prefix:
            yield f"{prefix}{key}", 1.0


def settings_of(tree: Json, prefix: str = "") -> dict[str, str]:
    """Every setting by its dotted name, as text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= settings_of(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found
